#include "train/rank_run.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <span>

#include "base/machine.h"
#include "base/text.h"
#include "base/units.h"
#include "options/model_options.h"
#include "runtime/device_memory.h"
#include "train/memory_remedies.h"
#include "train/planned_step.h"
#include "train/rank_hardware.h"

namespace troupe {

namespace {

// "--seed 6 instead of 5"; empty: nothing differs.
std::string describe_differences(const Options& expected, const Options& other) {
  if (expected.command != other.command) {
    return fmt::format("troupe {} instead of troupe {}", info_of(other.command).name,
                       info_of(expected.command).name);
  }
  constexpr size_t kNamed = 8;
  std::string text;
  const std::vector<OptionDifference> all = differences(expected, other);
  for (size_t i = 0; i < all.size() && i < kNamed; ++i) {
    text += fmt::format("{}--{} {} instead of {}", text.empty() ? "" : ", ", all[i].spec->name,
                        printable(all[i].after), printable(all[i].before));
  }
  if (all.size() > kNamed) text += fmt::format(" and {} others", all.size() - kNamed);
  return text;
}

}  // namespace

void require_same_options(const Options& options, ProcessGroup& group, int32_t rank) {
  const std::vector<std::string> all = group.gather(rank, to_json(options));
  std::map<std::string, std::vector<int32_t>> ranks_of;  // by difference
  for (size_t other = 1; other < all.size(); ++other) {
    Options started = options;
    from_json(started, all[other], group.name_of_rank(static_cast<int32_t>(other)));
    const std::string difference = describe_differences(options, started);
    if (!difference.empty()) ranks_of[difference].push_back(static_cast<int32_t>(other));
  }
  std::string text;
  for (const auto& [difference, ranks] : ranks_of) {
    text += fmt::format("{}{} with {}", text.empty() ? "" : "; ",
                        ranks.size() == 1 ? group.name_of_rank(ranks.front())
                                          : fmt::format("ranks {}", fmt::join(ranks, ", ")),
                        difference);
  }
  if (!text.empty()) {
    throw_bad_request(fmt::format(
        "Not all ranks were started with the options of {}: {}. Give all ranks the same flags.",
        group.name_of_rank(0), text));
  }
  group.exchange(rank, 0);  // no rank begins before the verdict
}

void require_memory(const Options& options, ProcessGroup* group, int32_t rank, uint64_t bytes,
                    int gpu, const std::string& breakdown) {
  const bool on_gpu = options.device == Device::cuda;
  uint64_t sum = bytes;
  size_t sharing = 1;
  if (group != nullptr) {
    const uint64_t identity = on_gpu ? gpu_identity(gpu) : 0;
    if (on_gpu) require_own_gpu(*group, rank, identity, options.ranks_per_gpu);
    const std::vector<uint64_t> needs = group->exchange(rank, bytes);
    const std::vector<uint64_t> gpus = group->exchange(rank, identity);
    sum = 0;
    sharing = 0;
    bool speaks = true;
    for (const int32_t other : group->ranks_of_machine()) {
      if (gpus[static_cast<size_t>(other)] != identity) continue;
      const uint64_t need = needs[static_cast<size_t>(other)];
      sum += need;
      ++sharing;
      if (need > bytes || (need == bytes && other < rank)) speaks = false;
    }
    if (!speaks) return;
  }
  const uint64_t available = on_gpu ? available_device_bytes(gpu) : available_memory_bytes();
  if (available == 0 || sum <= available) return;
  const bool trains = options.command == Command::train || options.command == Command::bench;
  std::string remedies =
      trains ? describe_remedies(options, rank, bytes, available)
             : "Use a smaller --micro-batch-size or --seq-length, or more ranks, each with a part "
               "of the model (docs/layouts.md).\n";
  remedies.pop_back();  // the newline
  throw UserError(
      ExitStatus::does_not_fit,
      fmt::format("The run needs {}{}, this {} has {} available{}:\n{}{}", format_bytes(sum),
                  sharing > 1 ? fmt::format(" for {} ranks", sharing) : "",
                  on_gpu ? "GPU" : "machine", format_bytes(available),
                  group != nullptr ? fmt::format("; of rank {}", rank) : "", breakdown, remedies));
}

void require_host_memory(const Options& options, ProcessGroup* group, int32_t rank,
                         const MemoryPlan& plan) {
  if (options.device != Device::cuda) return;
  uint64_t sum = plan.host_bytes();
  if (group != nullptr) {
    const std::vector<uint64_t> needs = group->exchange(rank, plan.host_bytes());
    sum = 0;
    for (const int32_t other : group->ranks_of_machine()) sum += needs[static_cast<size_t>(other)];
    if (rank != group->ranks_of_machine().front()) return;
  }
  const uint64_t available = available_memory_bytes();
  if (available == 0 || sum <= available) return;
  throw UserError(
      ExitStatus::does_not_fit,
      fmt::format("The run offloads {} to the host, which has {} available:\n{}Offload less: "
                  "--offload-modules, --activation-offload-fraction, --optimizer-offload-fraction.",
                  format_bytes(sum), format_bytes(available), describe_memory(plan, 0)));
}

ProfileLimits measure_limits_of_rank(const DeviceSpec& spec, ProcessGroup* group, int32_t rank,
                                     DType compute_dtype) {
  ProfileLimits limits;
  if (rank == 0) {
    ThreadPool all_threads(spec.thread_count());
    const auto sharing = static_cast<double>(ranks_that_share(spec, group, spec.device));
    limits = measure_limits(compute_dtype, all_threads, spec.device);
    limits.flops /= sharing;
    limits.copy_bytes /= sharing;
  }
  if (group == nullptr) return limits;
  const auto of_rank_0 = [&](double value) {
    return std::bit_cast<double>(group->exchange(rank, std::bit_cast<uint64_t>(value)).front());
  };
  limits.flops = of_rank_0(limits.flops);
  limits.copy_bytes = of_rank_0(limits.copy_bytes);
  return limits;
}

void add_profiled_run(Interpreter& interpreter, ProcessGroup* group, int32_t rank,
                      StepProfile& profile) {
  using Clock = std::chrono::steady_clock;
  if (group == nullptr) return profile.add(interpreter.run_profiled());
  barrier(group, rank);
  const auto begin = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
          .count());
  std::vector<WorkSpan> spans = interpreter.run_profiled();
  const std::vector<uint64_t> begins = group->exchange(rank, begin);
  uint64_t first = begin;
  for (const int32_t other : group->ranks_of_machine()) {
    first = std::min(first, begins[static_cast<size_t>(other)]);
  }
  profile.add(std::move(spans), static_cast<double>(begin - first) * 1e-9);
}

std::vector<std::string> gather_from(ProcessGroup* group, int32_t rank,
                                     const std::vector<int32_t>& chosen, const std::string& text) {
  if (group == nullptr) return {text};
  const bool is_chosen = std::find(chosen.begin(), chosen.end(), rank) != chosen.end();
  const std::vector<std::string> all = group->gather(rank, is_chosen ? text : std::string());
  std::vector<std::string> gathered;
  for (const int32_t each : chosen) {
    if (!all.empty()) gathered.push_back(all[static_cast<size_t>(each)]);
  }
  return gathered;
}

WrittenTimelines write_timelines(const Options& options, ProcessGroup* group, int32_t rank,
                                 int64_t step, const std::vector<int32_t>& chosen,
                                 const StepProfile& profile) {
  const auto path = [&](const std::string& whose) {
    return fmt::format("{}/{}_step{}.json", options.profile_dir, whose, step);
  };
  const std::string events = profile.timeline_events(rank);
  std::string fault;
  const auto write = [&](const std::string& whose, std::span<const std::string> all) {
    try {
      write_timeline(path(whose), all);
    } catch (const UserError& error) {
      fault = error.what();
    }
  };
  if (std::find(chosen.begin(), chosen.end(), rank) != chosen.end()) {
    write(fmt::format("rank{}", rank), {&events, 1});
  }
  if (chosen.size() > 1) {
    const std::vector<std::string> all = gather_from(group, rank, chosen, events);
    if (rank == 0) write("ranks", all);
  }
  if (group != nullptr) {
    std::string first;
    for (const std::string& each : group->gather(rank, fault)) {
      if (first.empty()) first = each;
    }
    fault = first;
  }
  if (rank != 0) return {};
  if (chosen.size() == 1) {
    return {.note = fmt::format("step {} of rank {}: timeline in {}", step, chosen.front(),
                                path(fmt::format("rank{}", chosen.front()))),
            .fault = fault};
  }
  return {.note = fmt::format("step {} of the ranks {}: timelines in {}, all together in {}", step,
                              fmt::join(chosen, ", "), path("rank<R>"), path("ranks")),
          .fault = fault};
}

void barrier(ProcessGroup* group, int32_t rank) {
  if (group != nullptr) group->exchange(rank, 0);
}

}  // namespace troupe
