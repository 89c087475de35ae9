#include "train/step_profile.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fmt/format.h>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "base/units.h"
#include "io/file.h"
#include "program/op_spec.h"
#include "runtime/copy_limit.h"
#include "runtime/device_limits.h"
#include "train/matmul_limit.h"
#include "train/terminal.h"

namespace troupe {
namespace {

// Calls each(begin, end) for the stretches of time, in s, that the chosen spans cover together.
// Spans are in the order of their beginnings.
template <class Choose, class Each>
void for_covered(const std::vector<WorkSpan>& spans, const Choose& choose, const Each& each) {
  double begin = 0;
  double end = -1;
  for (const WorkSpan& span : spans) {
    if (!choose(span)) continue;
    if (span.begin_s > end) {
      if (end >= 0) each(begin, end);
      begin = span.begin_s;
    }
    end = std::max(end, span.begin_s + span.duration_s);
  }
  if (end >= 0) each(begin, end);
}

template <class Choose>
double covered_s(const std::vector<WorkSpan>& spans, const Choose& choose) {
  double sum = 0;
  for_covered(spans, choose, [&](double begin, double end) { sum += end - begin; });
  return sum;
}

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

StepProfile::StepProfile(const Program& program, std::vector<std::string> kernels)
    : program_(program),
      kernels_(std::move(kernels)),
      times_(static_cast<size_t>(program.op_count())) {}

void StepProfile::add(std::vector<WorkSpan> spans, double begin_s) {
  std::vector<double> sums(times_.size(), 0.0);
  for (const WorkSpan& span : spans) {
    if (span.op >= 0) sums[static_cast<size_t>(span.op)] += span.duration_s;
  }
  for (size_t i = 0; i < sums.size(); ++i) times_[i].push_back(sums[i]);
  last_ = std::move(spans);
  begin_s_ = begin_s;
}

std::vector<KindTime> StepProfile::kinds() const {
  std::map<std::string, KindTime> kinds;
  std::map<std::string, std::set<std::string>> kernels;
  const Program expected = program_.with_expected_rows();
  for (int32_t i = 0; i < expected.op_count(); ++i) {
    const Op& op = expected.op(i);
    const Cost cost = op.spec->cost(OpView{expected, op});
    KindTime& kind = kinds[op.spec->name];
    kind.kind = op.spec->name;
    if (!kernels_.empty()) kernels[kind.kind].insert(kernels_[static_cast<size_t>(i)]);
    kind.count += 1;
    kind.seconds += median(times_[static_cast<size_t>(i)]);
    kind.flops += cost.flops;
    kind.bytes += cost.bytes;
  }
  std::vector<KindTime> sorted;
  for (auto& [name, kind] : kinds) {
    kernels[name].erase(name);
    kind.kernels = fmt::format("{}", fmt::join(kernels[name], ", "));
    sorted.push_back(std::move(kind));
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const KindTime& a, const KindTime& b) { return a.seconds > b.seconds; });
  return sorted;
}

StepTimes StepProfile::times() const {
  const auto any = [](const WorkSpan&) { return true; };
  const auto is_on = [&](const WorkSpan& span, const auto& wanted) {
    return span.op >= 0 && wanted(program_.op(span.op).place.queue);
  };
  const auto communicates = [&](const WorkSpan& span) { return is_on(span, is_communication); };
  const auto computes = [&](const WorkSpan& span) {
    return is_on(span, [](Queue queue) { return queue == Queue::compute; });
  };
  const auto either = [&](const WorkSpan& span) { return communicates(span) || computes(span); };
  StepTimes times;
  times.busy_s = covered_s(last_, any);
  times.communication_s = covered_s(last_, communicates);
  times.exposed_communication_s = covered_s(last_, either) - covered_s(last_, computes);
  double end = -1;
  for (const WorkSpan& span : last_) {
    times.seconds = std::max(times.seconds, span.begin_s + span.duration_s);
    if (span.op < 0) continue;
    if (end >= 0 && span.begin_s - end > times.largest_gap_s) {
      times.largest_gap_s = span.begin_s - end;
      times.after_gap = program_.op(span.op).spec->name;
    }
    end = std::max(end, span.begin_s + span.duration_s);
  }
  return times;
}

std::string StepProfile::timeline_events(int32_t rank) const {
  const nlohmann::ordered_json name = {{"ph", "M"},
                                       {"name", "process_name"},
                                       {"pid", rank},
                                       {"args", {{"name", fmt::format("rank {}", rank)}}}};
  std::string events = name.dump();
  // Inputs and metrics travel on the compute queue.
  const auto queue_of = [&](const WorkSpan& span) {
    return span.op < 0 ? Queue::compute : program_.op(span.op).place.queue;
  };
  for (int i = 0; i < kQueueCount; ++i) {
    const auto queue = static_cast<Queue>(i);
    if (std::none_of(last_.begin(), last_.end(),
                     [&](const WorkSpan& span) { return queue_of(span) == queue; })) {
      continue;
    }
    const nlohmann::ordered_json track = {{"ph", "M"},
                                          {"name", "thread_name"},
                                          {"pid", rank},
                                          {"tid", static_cast<int>(queue)},
                                          {"args", {{"name", name_of(queue)}}}};
    events += "," + track.dump();
  }
  for (const WorkSpan& span : last_) {
    nlohmann::ordered_json event = {{"ph", "X"},
                                    {"name", span.name},
                                    {"cat", "step"},
                                    {"pid", rank},
                                    {"tid", static_cast<int>(queue_of(span))},
                                    {"ts", (begin_s_ + span.begin_s) * 1e6},
                                    {"dur", span.duration_s * 1e6}};
    if (span.op >= 0) {
      const Op& op = program_.op(span.op);
      event["name"] = op.spec->name;
      event["cat"] = name_of(op.place.phase);
      event["args"] = {{"operation", span.op},
                       {"phase", name_of(op.place.phase)},
                       {"queue", name_of(op.place.queue)},
                       {"kernel", span.name}};
      if (!kernels_.empty()) {
        event["args"]["variant"] = kernels_[static_cast<size_t>(span.op)];
      }
      if (op.place.layer >= 0) event["args"]["layer"] = op.place.layer;
      if (op.place.micro_batch >= 0) event["args"]["micro_batch"] = op.place.micro_batch;
      if (op.output_count > 0) {
        event["args"]["result"] = program_.value(program_.outputs(op)[0]).name;
      }
    }
    events += "," + event.dump();
  }
  return events;
}

void write_timeline(const std::string& path, std::span<const std::string> events) {
  const Disk disk;
  disk.make_directories(std::filesystem::path(path).parent_path().string());
  disk.write_file(path, fmt::format(R"({{"displayTimeUnit":"ms","traceEvents":[{}]}})",
                                    fmt::join(events, ",")));
}

ProfileLimits measure_limits(DType compute_dtype, ThreadPool& pool, Device device) {
  return {.flops = measure_matmul_limit(compute_dtype, pool, device),
          .copy_bytes =
              device == Device::cuda ? measure_device_copy_limit() : measure_copy_limit(pool)};
}

ProfileLimits best_limits(const ProfileLimits& measured, const StepProfile& profile) {
  TROUPE_CHECK(measured.flops > 0 && measured.copy_bytes > 0,
               "a profile is compared with limits that were measured");
  const std::vector<KindTime> kinds = profile.kinds();
  double sum = 0;
  for (const KindTime& kind : kinds) sum += kind.seconds;
  ProfileLimits best = measured;
  for (const KindTime& kind : kinds) {
    // Of what takes no time the clock says too little.
    if (kind.seconds <= 0.01 * sum) continue;
    best.flops = std::max(best.flops, kind.flops / kind.seconds);
    best.copy_bytes = std::max(best.copy_bytes, kind.bytes / kind.seconds);
  }
  return best;
}

namespace {

// "kernels: linear by cublaslt; ...", wrapped; empty where none is known.
std::string kernels_line(const std::vector<KindTime>& kinds, const std::string& filter) {
  std::vector<std::string> parts;
  for (const KindTime& kind : kinds) {
    if (kind.kernels.empty() || kind.kind.find(filter) == std::string::npos) continue;
    parts.push_back(fmt::format("{} by {}", kind.kind, kind.kernels));
  }
  if (parts.empty()) return {};
  return "\n" + wrap_text(fmt::format("kernels: {}", fmt::join(parts, "; ")), kDefaultColumns, 2) +
         "\n";
}

}  // namespace

std::string describe_profile(const StepProfile& profile, const ProfileLimits& measured,
                             const std::string& filter) {
  const ProfileLimits limits = best_limits(measured, profile);
  const std::vector<KindTime> kinds = profile.kinds();
  double sum = 0;
  for (const KindTime& kind : kinds) sum += kind.seconds;
  std::string text =
      fmt::format("{:<33} {:>5} {:>8} {:>5} {:>7} {:>4} {:>6} {:>4}\n", "operation kind", "count",
                  "time", "share", "Gflop/s", "of", "GB/s", "of");
  const auto rate = [](double giga) { return fmt::format("{:.{}f}", giga, giga < 1000 ? 1 : 0); };
  const auto percent = [](double value, double limit) {
    return std::min(100.0, 100 * value / limit);
  };
  for (const KindTime& kind : kinds) {
    if (kind.kind.find(filter) == std::string::npos) continue;
    // An operation that does nothing on this device takes no time.
    const double seconds = std::max(kind.seconds, 1e-12);
    text += fmt::format(
        "{:<33} {:>5} {:>8} {:>4.1f}% {:>7} {:>3.0f}% {:>6} {:>3.0f}%\n", kind.kind, kind.count,
        format_duration(kind.seconds), 100 * kind.seconds / sum, rate(kind.flops / seconds / 1e9),
        percent(kind.flops / seconds, limits.flops), rate(kind.bytes / seconds / 1e9),
        percent(kind.bytes / seconds, limits.copy_bytes));
  }
  text += kernels_line(kinds, filter);
  const StepTimes times = profile.times();
  text += "\n";
  std::string line =
      fmt::format("{} from first to last, idle {} of it, at most {} between operations{}",
                  format_duration(times.seconds), format_duration(times.seconds - times.busy_s),
                  format_duration(times.largest_gap_s),
                  times.after_gap.empty() ? "" : fmt::format(" (before {})", times.after_gap));
  if (times.communication_s > 0) {
    line +=
        fmt::format("; communication {}, {} of it exposed", format_duration(times.communication_s),
                    format_duration(times.exposed_communication_s));
  }
  return text + wrap_text(line, kDefaultColumns, 2) + "\n";
}

}  // namespace troupe
