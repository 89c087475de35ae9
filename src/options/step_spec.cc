#include "options/step_spec.h"

#include <utility>

#include "model/parameters.h"
#include "options/layout_options.h"
#include "options/model_options.h"

namespace troupe {

ModelState StepSpec::state_of(int32_t rank) const {
  return declare_model_state(model, dtype, /*trained=*/true, {.run = layout, .rank = rank});
}

StepSpec step_spec_of(const Options& options, ModelConfig model, const ProcessGroup* group) {
  auto layout = std::make_shared<const RunLayout>(run_layout_of(options, model, group));
  TrainingStepOptions step = training_step_options(options, model);
  return {.model = std::move(model),
          .dtype = options.compute_dtype,
          .layout = std::move(layout),
          .options = std::move(step)};
}

}  // namespace troupe
