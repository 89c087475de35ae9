#include "train/rank_run.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <fmt/format.h>

#include "base/machine.h"
#include "base/units.h"
#include "program/verify.h"
#include "runtime/device_memory.h"
#include "train/layout_options.h"
#include "train/model_options.h"

namespace troupe {

PlannedStep plan_training_step(const ModelConfig& config, const ModelState& state,
                               const TrainingStepOptions& options, int threads, Device device,
                               bool oracle) {
  PlannedStep planned{.step = build_training_step(config, state, options), .plan = {}};
  const Program& program = *planned.step.program;
  verify_program(program);
  planned.plan =
      oracle ? plan_oracle(program, threads, device) : plan_memory(program, threads, device);
  verify_memory_plan(program, planned.plan);
  return planned;
}

std::string describe_memory(const MemoryPlan& plan, uint64_t evaluation_bytes) {
  std::string text;
  for (int i = 0; i < kRoleCount; ++i) {
    const uint64_t bytes = plan.bytes_by_role[static_cast<size_t>(i)];
    if (bytes == 0) continue;
    text += fmt::format("  {:<14} {:>12}\n", name_of(static_cast<Role>(i)), format_bytes(bytes));
  }
  if (evaluation_bytes > 0) {
    text += fmt::format("  {:<14} {:>12}\n", "evaluation", format_bytes(evaluation_bytes));
  }
  return text + fmt::format("  {:<14} {:>12}\n", "total",
                            format_bytes(plan.total_bytes() + evaluation_bytes));
}

void require_memory(const Options& options, ProcessGroup* group, int32_t rank, uint64_t bytes,
                    int gpu, const std::string& breakdown) {
  const bool on_gpu = device_of(options) == Device::cuda;
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
  throw UserError(
      ExitStatus::does_not_fit,
      fmt::format("The run needs {}{}, this {} has {} available{}:\n{}Use a smaller "
                  "--micro-batch-size, --seq-length or model{}.",
                  format_bytes(sum), sharing > 1 ? fmt::format(" for {} ranks", sharing) : "",
                  on_gpu ? "GPU" : "machine", format_bytes(available),
                  group != nullptr ? fmt::format("; of rank {}", rank) : "", breakdown,
                  sharing > 1 ? ", or fewer ranks" : ""));
}

ProfileLimits measure_limits_of_rank(const Options& options, ProcessGroup* group, int32_t rank,
                                     DType compute_dtype, Device device) {
  ProfileLimits limits;
  if (rank == 0) {
    ThreadPool all_threads(thread_count(options));
    const auto sharing = static_cast<double>(ranks_that_share(options, group, device));
    limits = measure_limits(compute_dtype, all_threads, device);
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
  meet(group, rank);
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

std::string write_timelines(const Options& options, ProcessGroup* group, int32_t rank, int64_t step,
                            const std::vector<int32_t>& chosen, const StepProfile& profile) {
  const auto path = [&](const std::string& whose) {
    return fmt::format("{}/{}_step{}.json", options.profile_dir, whose, step);
  };
  const std::string events = profile.timeline_events(rank);
  if (std::find(chosen.begin(), chosen.end(), rank) != chosen.end()) {
    write_timeline(path(fmt::format("rank{}", rank)), {&events, 1});
  }
  if (chosen.size() == 1) {
    return fmt::format("step {} of rank {}: timeline in {}", step, chosen.front(),
                       path(fmt::format("rank{}", chosen.front())));
  }
  const std::vector<std::string> all = gather_from(group, rank, chosen, events);
  if (rank == 0) write_timeline(path("ranks"), all);
  return fmt::format("step {} of the ranks {}: timelines in {}, all together in {}", step,
                     fmt::join(chosen, ", "), path("rank<R>"), path("ranks"));
}

void meet(ProcessGroup* group, int32_t rank) {
  if (group != nullptr) group->exchange(rank, 0);
}

}  // namespace troupe
