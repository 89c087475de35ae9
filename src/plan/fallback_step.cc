#include "plan/fallback_step.h"

#include <algorithm>

#include "passes/step_programs.h"

namespace troupe {
namespace {

// Lets a program of the other plan run in this one's arenas.
void make_room_for(const MemoryPlan& other, MemoryPlan& plan) {
  const auto device_bytes = [](const MemoryPlan& each) {
    return each.persistent_bytes + each.transient_bytes + each.scratch_bytes();
  };
  const uint64_t needed = std::max(device_bytes(plan), device_bytes(other)) - device_bytes(plan);
  plan.transient_bytes += needed;
  plan.bytes_by_role[static_cast<size_t>(Role::activation)] += needed;
  const uint64_t on_host = std::max(plan.host_transient_bytes, other.host_transient_bytes);
  plan.host_bytes_by_role[static_cast<size_t>(Role::offloaded)] +=
      on_host - plan.host_transient_bytes;
  plan.host_transient_bytes = on_host;
}

}  // namespace

std::optional<FallbackStep> plan_fallback_step(
    const ModelConfig& config, const ModelState& state, const TrainingStepOptions& options,
    const TrainingStep& step, MemoryPlan& memory,
    const std::function<MemoryPlan(const Program&)>& plan) {
  if (!step.rooms_lacked.valid()) return std::nullopt;
  TrainingStepOptions in_rounds = options;
  in_rounds.expert_rounds = true;
  in_rounds.overlap = {};
  FallbackStep fallback{.step = build_training_step(config, state, in_rounds), .memory = {}};
  fallback.memory = plan(*fallback.step.program);
  make_room_for(fallback.memory, memory);
  return fallback;
}

}  // namespace troupe
