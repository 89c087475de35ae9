#include "report/step_page.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <fmt/format.h>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/file.h"
#include "io/json.h"
#include "options/options.h"
#include "passes/queue_events.h"
#include "passes/value_lifetimes.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr size_t kMostColumns = 600;   // of the chart of memory
constexpr size_t kMostExplained = 12;  // values at the peak
constexpr size_t kMostLines = 20'000;  // of the program
constexpr int kDeepestFile = 16;
constexpr uint64_t kMostMeasuredBytes = uint64_t{1} << 30;

constexpr std::array kTransientRoles = {Role::activation, Role::workspace, Role::communication,
                                        Role::stash};

IdVector<ValueId, Lifetime> lifetimes_of(const StepOnPage& step) {
  IdVector<ValueId, Lifetime> lifetimes = find_lifetimes(step.program, step.plan.device);
  if (step.oracle) return lifetimes;
  if (step.plan.device == Device::cuda) reserve_for_queues(step.program, lifetimes);
  share_in_place(step.program, lifetimes);
  return lifetimes;
}

// Whether the value has memory of its own among what is live on the device.
bool has_memory(const Program& program, const IdVector<ValueId, Lifetime>& lifetimes, ValueId id) {
  const Value& value = program.value(id);
  return is_transient(value) && !is_on_host(value.role) && lifetimes[id].root == id &&
         lifetimes[id].first >= 0;
}

// Stretches of operations, of each that one where most is live, and what is live then by role.
ordered_json memory_json(const StepOnPage& step, const IdVector<ValueId, Lifetime>& lifetimes) {
  const Program& program = step.program;
  const auto ops = static_cast<size_t>(program.op_count());
  std::array<std::vector<int64_t>, kRoleCount> live;
  for (const Role role : kTransientRoles) live[static_cast<size_t>(role)].resize(ops + 1);
  for (int32_t i = 0; i < program.value_count(); ++i) {
    if (!has_memory(program, lifetimes, ValueId{i})) continue;
    const Value& value = program.value(ValueId{i});
    const auto size = static_cast<int64_t>(MemoryPlan::aligned(value.bytes()));
    std::vector<int64_t>& changes = live[static_cast<size_t>(value.role)];
    changes[static_cast<size_t>(lifetimes[ValueId{i}].first)] += size;
    changes[static_cast<size_t>(lifetimes[ValueId{i}].last) + 1] -= size;
  }
  for (auto& changes : live) {
    for (size_t i = 1; i < changes.size(); ++i) changes[i] += changes[i - 1];
  }
  const size_t columns = std::min(ops, kMostColumns);
  ordered_json at = ordered_json::array();
  ordered_json roles;
  for (const Role role : kTransientRoles) roles[std::string(name_of(role))] = ordered_json::array();
  for (size_t column = 0; column < columns; ++column) {
    const auto begin = step.plan.live_bytes.begin() + static_cast<int64_t>(column * ops / columns);
    const auto end =
        step.plan.live_bytes.begin() + static_cast<int64_t>((column + 1) * ops / columns);
    const auto most =
        static_cast<size_t>(std::max_element(begin, end) - step.plan.live_bytes.begin());
    at.push_back(most);
    for (const Role role : kTransientRoles) {
      roles[std::string(name_of(role))].push_back(live[static_cast<size_t>(role)][most]);
    }
  }
  return {{"operations", std::move(at)}, {"bytes", std::move(roles)}};
}

// The largest values that are live at the operation where most is.
ordered_json peak_json(const StepOnPage& step, const IdVector<ValueId, Lifetime>& lifetimes) {
  const Program& program = step.program;
  const auto& live = step.plan.live_bytes;
  const auto peak = static_cast<int32_t>(std::max_element(live.begin(), live.end()) - live.begin());
  std::vector<ValueId> values;
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Lifetime& lifetime = lifetimes[ValueId{i}];
    if (has_memory(program, lifetimes, ValueId{i}) && lifetime.first <= peak &&
        lifetime.last >= peak) {
      values.push_back(ValueId{i});
    }
  }
  std::stable_sort(values.begin(), values.end(), [&](ValueId a, ValueId b) {
    return program.value(a).bytes() > program.value(b).bytes();
  });
  // Values of one name are one entry: those of layers are alike.
  std::map<std::pair<std::string, Role>, ordered_json> groups;
  std::vector<std::pair<std::string, Role>> order;
  for (const ValueId id : values) {
    const Value& value = program.value(id);
    const std::pair<std::string, Role> key = {value.name, value.role};
    const auto [found, is_new] =
        groups.try_emplace(key, ordered_json{{"name", value.name},
                                             {"role", name_of(value.role)},
                                             {"count", 0},
                                             {"bytes", uint64_t{0}},
                                             {"first", lifetimes[id].first},
                                             {"last", lifetimes[id].last}});
    if (is_new) order.push_back(key);
    ordered_json& group = found->second;
    group["count"] = group["count"].get<int64_t>() + 1;
    group["bytes"] = group["bytes"].get<uint64_t>() + MemoryPlan::aligned(value.bytes());
    group["first"] = std::min(group["first"].get<int32_t>(), lifetimes[id].first);
    group["last"] = std::max(group["last"].get<int32_t>(), lifetimes[id].last);
  }
  std::vector<ordered_json> entries;
  for (const auto& key : order) entries.push_back(std::move(groups.at(key)));
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return a["bytes"].template get<uint64_t>() > b["bytes"].template get<uint64_t>();
  });
  const size_t named = entries.size();
  if (named > kMostExplained) entries.resize(kMostExplained);
  return {{"operation", peak},
          {"kind", program.op(peak).spec->name},
          {"phase", name_of(program.op(peak).place.phase)},
          {"layer", program.op(peak).place.layer},
          {"micro_batch", program.op(peak).place.micro_batch},
          {"bytes", live[static_cast<size_t>(peak)]},
          {"names", named},
          {"values", std::move(entries)}};
}

ordered_json plan_json(const MemoryPlan& plan) {
  ordered_json bytes;
  ordered_json host;
  for (int i = 0; i < kRoleCount; ++i) {
    const std::string role(name_of(static_cast<Role>(i)));
    bytes[role] = plan.bytes_by_role[static_cast<size_t>(i)];
    host[role] = plan.host_bytes_by_role[static_cast<size_t>(i)];
  }
  return {{"bytes", std::move(bytes)},
          {"host_bytes", std::move(host)},
          {"state_bytes", plan.state_bytes},
          {"persistent_bytes", plan.persistent_bytes},
          {"transient_bytes", plan.transient_bytes},
          {"largest_live_bytes", plan.largest_live_bytes},
          {"scratch_bytes", plan.scratch_bytes()},
          {"total_bytes", plan.total_bytes()}};
}

// By operation, as columns: a table of names, and numbers in it.
ordered_json operations_json(const Program& program) {
  std::map<std::string, size_t> numbers;
  ordered_json kinds = ordered_json::array();
  ordered_json kind = ordered_json::array();
  ordered_json phase = ordered_json::array();
  ordered_json queue = ordered_json::array();
  ordered_json layer = ordered_json::array();
  ordered_json micro_batch = ordered_json::array();
  for (int32_t i = 0; i < program.op_count(); ++i) {
    const Op& op = program.op(i);
    const auto [found, is_new] = numbers.try_emplace(op.spec->name, numbers.size());
    if (is_new) kinds.push_back(op.spec->name);
    kind.push_back(found->second);
    phase.push_back(static_cast<int>(op.place.phase));
    queue.push_back(static_cast<int>(op.place.queue));
    layer.push_back(op.place.layer);
    micro_batch.push_back(op.place.micro_batch);
  }
  return {{"kinds", std::move(kinds)}, {"kind", std::move(kind)},
          {"phase", std::move(phase)}, {"queue", std::move(queue)},
          {"layer", std::move(layer)}, {"micro_batch", std::move(micro_batch)}};
}

// Planned work of each kind of operation.
ordered_json kinds_json(const Program& program) {
  const Program expected = program.with_expected_rows();
  struct Sum {
    int64_t count = 0;
    double flops = 0;
    double bytes = 0;
  };
  std::map<std::string, Sum> sums;
  for (int32_t i = 0; i < expected.op_count(); ++i) {
    const Op& op = expected.op(i);
    Sum& sum = sums[op.spec->name];
    ++sum.count;
    if (op.spec->cost == nullptr) continue;
    const Cost cost = op.spec->cost(OpView{expected, op});
    sum.flops += cost.flops;
    sum.bytes += cost.bytes;
  }
  ordered_json kinds = ordered_json::array();
  for (const auto& [kind, sum] : sums) {
    kinds.push_back(
        {{"kind", kind}, {"count", sum.count}, {"flops", sum.flops}, {"traffic_bytes", sum.bytes}});
  }
  return kinds;
}

ordered_json waits_json(const Program& program, const MemoryPlan& plan) {
  ordered_json waits = ordered_json::array();
  for (const QueueEvent& event : find_queue_events(program, plan)) {
    waits.push_back({event.before, event.after});
  }
  return waits;
}

ordered_json lines_json(const std::string& text, size_t& left_out) {
  ordered_json lines = ordered_json::array();
  size_t begin = 0;
  left_out = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    if (lines.size() < kMostLines) {
      lines.push_back(text.substr(begin, end - begin));
    } else {
      ++left_out;
    }
    begin = end + 1;
  }
  return lines;
}

[[noreturn]] void refuse_other_program(const std::string& path) {
  throw_bad_request(fmt::format(
      "--measured {}: this was measured with another program than the one that these flags "
      "describe. Give the flags that bench or train had (--config RUN/options.toml).",
      path));
}

// Begin and time of each operation, in microseconds, as [operation, begin, time].
ordered_json timeline_json(const Program& program, const json& document, const std::string& path,
                           int32_t rank) {
  ordered_json spans = ordered_json::array();
  for (const json& event : document.at("traceEvents")) {
    if (event.value("ph", "") != "X" || event.value("pid", -1) != rank || !event.contains("args") ||
        !event["args"].contains("operation")) {
      continue;
    }
    const int64_t op = integer_field(event["args"], "operation", 0, INT32_MAX, path);
    if (op >= program.op_count() ||
        event.value("name", "") != program.op(static_cast<int32_t>(op)).spec->name) {
      refuse_other_program(path);
    }
    spans.push_back({op, event.at("ts"), event.at("dur")});
  }
  if (spans.empty()) {
    throw_bad_request(
        fmt::format("--measured {}: the timeline has no operations of rank {}.", path, rank));
  }
  return {{"spans", std::move(spans)}};
}

ordered_json bench_json(const Program& program, const json& document, const std::string& path) {
  if (document.at("operations") != program.op_count()) refuse_other_program(path);
  ordered_json measured;
  for (const char* name : {"step_time_s", "tokens_per_s", "tflops_per_gpu", "matmul_limit_share",
                           "matmul_limit_flops_per_s", "copy_limit_bytes_per_s", "planned_bytes",
                           "allocated_bytes", "other_device_bytes", "kinds"}) {
    if (document.contains(name)) measured[name] = document[name];
  }
  return {{"bench", std::move(measured)}};
}

}  // namespace

nlohmann::ordered_json step_json(const StepOnPage& step) {
  const IdVector<ValueId, Lifetime> lifetimes = lifetimes_of(step);
  size_t left_out = 0;
  ordered_json lines = lines_json(step.text, left_out);
  ordered_json phases = ordered_json::array();
  for (int i = 0; i <= static_cast<int>(Phase::optimizer); ++i) {
    phases.push_back(name_of(static_cast<Phase>(i)));
  }
  ordered_json queues = ordered_json::array();
  for (int i = 0; i < kQueueCount; ++i) queues.push_back(name_of(static_cast<Queue>(i)));
  return {{"version", kVersion},
          {"title", step.title},
          {"command", step.command},
          {"plan", plan_json(step.plan)},
          {"memory", memory_json(step, lifetimes)},
          {"peak", peak_json(step, lifetimes)},
          {"phases", std::move(phases)},
          {"queues", std::move(queues)},
          {"operations", operations_json(step.program)},
          {"waits", waits_json(step.program, step.plan)},
          {"kinds", kinds_json(step.program)},
          {"lines", std::move(lines)},
          {"lines_left_out", left_out}};
}

nlohmann::ordered_json measured_json(const Program& program, const std::string& path,
                                     int32_t rank) {
  const json document = parse_json(read_file(path, kMostMeasuredBytes), path, kDeepestFile);
  try {
    if (document.is_object() && document.contains("traceEvents")) {
      return timeline_json(program, document, path, rank);
    }
    if (document.is_object() && document.contains("allocated_bytes")) {
      return bench_json(program, document, path);
    }
  } catch (const json::exception& error) {
    throw_bad_request(
        fmt::format("--measured {}: this is not as bench --json or --profile write it: {}.", path,
                    reason_of(error)));
  }
  throw_bad_request(fmt::format(
      "--measured {}: this is neither what bench --json printed nor a timeline of --profile.",
      path));
}

}  // namespace troupe
