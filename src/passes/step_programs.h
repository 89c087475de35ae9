// Builds the complete training step of one rank: every micro-batch forward and backward, gradient
// norm and clipping, optimizer. Programs without training: passes/inference_programs.h.
//
// Every rank has a program of its own, for its part of the model (ModelState::part). In a pipeline
// it does what the schedule's table gives it, in that order: stages forward and backward, and the
// messages between stages. Gradients are summed over the ranks once, after the last micro-batch,
// with the divisors of one rank that ran all micro-batches; so are the metrics. What is read after
// a run is therefore that of the whole step, on every rank alike, except what only some ranks have:
// see each member. What a rank does not have is an invalid ValueId.
//
// All programs built on one ModelState share its storage. What is returned names the values that
// the host writes before a run (inputs) and reads after it (metrics, results).
#pragma once

#include "model/model_config.h"
#include "model/parameters.h"
#include "passes/training_step.h"

namespace troupe {

TrainingStep build_training_step(const ModelConfig& config, const ModelState& state,
                                 const TrainingStepOptions& options);

}  // namespace troupe
