// From options to a training step: all that its programs are built from, resolved once.
//
// Pure functions of the options and the model; any thread. Errors are UserErrors (bad request) that
// name the flag.
#pragma once

#include <cstdint>
#include <memory>

#include "base/dtype.h"
#include "comm/process_group.h"
#include "model/model_config.h"
#include "model/model_state.h"
#include "options/options.h"
#include "passes/training_step.h"

namespace troupe {

struct StepSpec {
  ModelConfig model;
  DType dtype = DType::f32;  // that it is computed in
  std::shared_ptr<const RunLayout> layout;
  TrainingStepOptions options;

  // A rank's part, with gradients and optimizer state.
  ModelState state_of(int32_t rank) const;
};

// The step of the largest batch of a run of this model. `group`: of ranks that are processes; null
// where all are on one machine.
StepSpec step_spec_of(const Options& options, ModelConfig model,
                      const ProcessGroup* group = nullptr);

}  // namespace troupe
