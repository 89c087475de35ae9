// The step that takes the place of one for which the experts' room did not suffice
// (RunLayout::expert_room, docs/memory.md "Room for experts"): the same numbers, with tokens that
// reach the experts in rounds. It is planned beside the other before the run, and works in the same
// memory.
//
// Pure functions of their arguments; any thread.
#pragma once

#include <functional>
#include <optional>

#include "model/model_config.h"
#include "model/parameters.h"
#include "passes/memory_plan.h"
#include "passes/training_step.h"

namespace troupe {

struct FallbackStep {
  TrainingStep step;
  MemoryPlan memory;
};

// Of the step that was built with these options and its plan, which is made as large as the other
// needs it. Empty where room always suffices, on all ranks alike. `plan` verifies and plans a
// program of the rank.
std::optional<FallbackStep> plan_fallback_step(
    const ModelConfig& config, const ModelState& state, const TrainingStepOptions& options,
    const TrainingStep& step, MemoryPlan& memory,
    const std::function<MemoryPlan(const Program&)>& plan);

}  // namespace troupe
