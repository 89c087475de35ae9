#include "train/rank_session.h"

#include <fmt/format.h>
#include <utility>

#include "base/error.h"
#include "base/machine.h"
#include "base/units.h"
#include "parallel/group_schedule.h"
#include "parallel/rank_communicators.h"
#include "runtime/device_memory.h"
#include "runtime/make_interpreter.h"
#include "train/rank_hardware.h"

namespace troupe {

RankSession::RankSession(const DeviceSpec& spec, int32_t rank, ProcessGroup* group)
    : spec_(spec),
      rank_(rank),
      group_(group),
      gpu_(spec.device == Device::cuda ? gpu_of_rank(group, rank, spec.ranks_per_gpu) : 0),
      pool_(threads_of_rank(spec, group)) {}

void RankSession::declare(const ModelConfig& config, DType dtype, bool trained,
                          std::shared_ptr<const RunLayout> layout) {
  state_ = declare_model_state(config, dtype, trained, {.run = std::move(layout), .rank = rank_});
}

MemoryPlan RankSession::plan(const Program& program, bool oracle) const {
  return plan_program(program, pool_.threads(), device(), traits_of(device(), gpu_), oracle);
}

void RankSession::check(const std::vector<PlannedProgram>& programs, const Remedies& remedies,
                        uint64_t others) const {
  const MemoryPlan& plan = *programs.front().memory;
  uint64_t beside = 0;  // of the others, on the same state
  for (size_t i = 1; i < programs.size(); ++i) beside += programs[i].memory->own_bytes();
  require_memory(plan, beside, others, remedies);
  require_host_memory(plan);
  for (const PlannedProgram& each : programs) check_collectives(*each.program);
}

void RankSession::check_collectives(const Program& program) const {
  if (group_ != nullptr) verify_collectives(*group_, rank_, program, layout());
}

void RankSession::require_memory(const MemoryPlan& plan, uint64_t beside, uint64_t others,
                                 const Remedies& remedies) const {
  const bool on_gpu = device() == Device::cuda;
  const uint64_t bytes = plan.total_bytes() + beside + others;
  uint64_t sum = bytes;
  size_t sharing = 1;
  if (group_ != nullptr) {
    const uint64_t identity = on_gpu ? gpu_identity(gpu_) : 0;
    if (on_gpu) require_own_gpu(*group_, rank_, identity, spec_.ranks_per_gpu);
    const std::vector<uint64_t> needs = exchange(bytes);
    const std::vector<uint64_t> gpus = exchange(identity);
    sum = 0;
    sharing = 0;
    // Of the ranks that share the memory the one that needs most speaks.
    bool speaks = true;
    for (const int32_t other : group_->ranks_of_machine()) {
      if (gpus[static_cast<size_t>(other)] != identity) continue;
      const uint64_t need = needs[static_cast<size_t>(other)];
      sum += need;
      ++sharing;
      if (need > bytes || (need == bytes && other < rank_)) speaks = false;
    }
    if (!speaks) return;
  }
  const uint64_t available = on_gpu ? available_device_bytes(gpu_) : available_memory_bytes();
  if (available == 0 || sum <= available) return;
  throw UserError(
      ExitStatus::does_not_fit,
      fmt::format("The run needs {}{}, this {} has {} available{}:\n{}{}", format_bytes(sum),
                  sharing > 1 ? fmt::format(" for {} ranks", sharing) : "",
                  on_gpu ? "GPU" : "machine", format_bytes(available),
                  group_ != nullptr ? fmt::format("; of rank {}", rank_) : "",
                  describe_memory(plan, beside, others), remedies(bytes, available)));
}

// Of the ranks of a machine, beside the memory of their GPUs.
void RankSession::require_host_memory(const MemoryPlan& plan) const {
  if (device() != Device::cuda) return;
  uint64_t sum = plan.host_bytes();
  if (group_ != nullptr) {
    const std::vector<uint64_t> needs = exchange(sum);
    sum = 0;
    for (const int32_t other : group_->ranks_of_machine()) sum += needs[static_cast<size_t>(other)];
    if (rank_ != group_->ranks_of_machine().front()) return;
  }
  const uint64_t available = available_memory_bytes();
  if (available == 0 || sum <= available) return;
  throw UserError(
      ExitStatus::does_not_fit,
      fmt::format("The run offloads {} to the host, which has {} available:\n{}Offload less: "
                  "--offload-modules, --activation-offload-fraction, --optimizer-offload-fraction.",
                  format_bytes(sum), format_bytes(available), describe_memory(plan)));
}

void RankSession::allocate() {
  storage_.emplace(state_.table, device(), gpu_);
}

std::unique_ptr<Interpreter> RankSession::interpreter(const Program& program, MemoryPlan plan,
                                                      InterpreterOptions options) {
  options.shares_gpu = spec_.ranks_per_gpu > 1;
  return make_interpreter(program, std::move(plan), *storage_, pool_,
                          communicators_of(group_, layout(), rank_), options);
}

std::vector<uint64_t> RankSession::exchange(uint64_t value) const {
  return group_ == nullptr ? std::vector<uint64_t>{value} : group_->exchange(rank_, value);
}

std::string remedy_of_inference(uint64_t, uint64_t) {
  return "Use a smaller --micro-batch-size or --seq-length, or more ranks, each with a part of the "
         "model (docs/layouts.md).";
}

}  // namespace troupe
