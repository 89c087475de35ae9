// The end of a training step: norm and clipping of the gradients, the optimizer, the expert biases,
// and what is measured of them. Gradients and counts are those of all ranks by then.
#pragma once

#include "model/parameters.h"
#include "passes/training_step.h"
#include "program/builder.h"

namespace troupe {

// Emits it at the builder's place, and names in `step` what the host reads of it. The inputs of the
// step and its layers' metrics must be there.
void build_update(Builder& builder, const ModelConfig& config, const ModelState& state,
                  const TrainingStepOptions& options, TrainingStep& step);

}  // namespace troupe
