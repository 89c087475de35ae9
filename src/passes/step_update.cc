#include "passes/step_update.h"

#include <span>

#include "ops/optimizer/accumulate/accumulate.h"
#include "ops/optimizer/gradient_norm/gradient_norm.h"
#include "ops/routing/expert_bias_update/expert_bias_update.h"
#include "passes/rank_sums.h"

namespace troupe {
namespace {

// A number of the whole step, for the host.
ValueId measure(Builder& builder, const char* name, ValueId value) {
  const ValueId metric = builder.metric(name, DType::f64, {1});
  accumulate(builder, metric, value, 1, /*overwrite=*/true);
  return metric;
}

}  // namespace

void build_update(Builder& builder, const ModelConfig& config, const ModelState& state,
                  const TrainingStepOptions& options, TrainingStep& step) {
  const ClipResult clip =
      clip_coefficient(builder, squared_gradient_norm(builder, state),
                       {.max_norm = options.clip_grad, .skip_norm = options.skip_norm}, "grad_norm",
                       step.rooms_lacked, step.loss_scale);
  step.grad_norm = clip.norm;
  if (options.count_zero_gradients) {
    step.zero_gradients = measure(builder, "num_zeros", zero_gradients(builder, state));
  }
  step.skipped = clip.skip;
  const UpdateScalars scalars{.learning_rate = step.learning_rate,
                              .weight_decay = step.weight_decay,
                              .number = step.update_number,
                              .coefficient = clip.coefficient,
                              .skip = clip.skip};
  const std::span<const Parameter> all = state.parameters;
  size_t gathered = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const Parameter& parameter = all[i];
    if (options.overlap_parameter_gathers && parameter.layer != all[gathered].layer) {
      gather_parameters_over_ranks(builder, state, all.subspan(gathered, i - gathered));
      gathered = i;
    }
    if (!parameter.is_updated()) continue;
    builder.place.layer = static_cast<int16_t>(parameter.layer);
    UpdateScalars own = scalars;
    if (options.decoupled_learning_rate && parameter.is_outer) {
      own.learning_rate = step.decoupled_learning_rate;
    }
    const StateTensor& value = (*state.table)[parameter.value];
    const ValueId gradient = builder.state(parameter.gradient);
    state.part.run->optimizer->emit_update(
        builder,
        {.what = parameter.optimized,
         .parameter = value.is_stored ? builder.state(parameter.value) : ValueId{},
         .gradient = gradient,
         .master = parameter.master.valid() ? builder.state(parameter.master) : ValueId{},
         .tensors = parameter.optimizer,
         .first = parameter.shard.begin - parameter.held.begin,
         .decay = parameter.decay || (options.decay_qk_norms && parameter.is_qk_norm),
         .name = value.name},
        own);
  }
  builder.place.layer = Place{}.layer;
  gather_parameters_over_ranks(builder, state, all.subspan(gathered));
  if (options.parameter_norm) {
    step.squared_parameter_norm =
        measure(builder, "squared_params_norm", squared_parameter_norm(builder, state));
  }
  for (const LayerMetrics& metrics : step.layers) {
    const StateId expert_bias = state.expert_biases[static_cast<size_t>(metrics.layer)];
    if (!expert_bias.valid()) continue;
    builder.place.layer = static_cast<int16_t>(metrics.layer);
    expert_bias_update(builder, builder.state(expert_bias), metrics.counts, clip.skip,
                       {.rate = config.moe_router_bias_update_rate});
  }
}

}  // namespace troupe
