#include "passes/step_programs.h"

#include "ops/accumulate/accumulate.h"
#include "ops/adamw/adamw.h"
#include "ops/fill/fill.h"
#include "ops/gradient_norm/gradient_norm.h"
#include "passes/autodiff.h"

namespace troupe {
namespace {

DType compute_dtype(const ModelState& state) {
  return (*state.table)[state.parameters.front().value].dtype;
}

std::vector<LayerMetrics> declare_layer_metrics(Builder& builder, const ModelConfig& config,
                                                bool training) {
  std::vector<LayerMetrics> layers;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe_layer(layer)) continue;
    LayerMetrics metrics;
    metrics.layer = layer;
    metrics.counts = builder.metric("expert_rows", DType::f64, {config.num_experts});
    if (training && config.moe_aux_loss_coeff > 0) {
      metrics.load_balancing_loss = builder.metric("load_balancing_loss", DType::f64, {1});
    }
    if (training && config.moe_z_loss_coeff > 0) {
      metrics.z_loss = builder.metric("z_loss", DType::f64, {1});
    }
    layers.push_back(metrics);
  }
  return layers;
}

// Adds what one micro-batch measured to the step's metrics.
void accumulate_metrics(Builder& builder, const ForwardResult& forward, ValueId loss,
                        const std::vector<LayerMetrics>& layers, int32_t micro_batch,
                        int32_t micro_batches) {
  const bool first = micro_batch == 0;
  const double share = 1.0 / micro_batches;
  accumulate(builder, loss, forward.loss, share, first);
  const Place caller_place = builder.place;
  for (const LayerMetrics& metrics : layers) {
    builder.place.layer = static_cast<int16_t>(metrics.layer);
    for (const auto& load : forward.expert_loads) {
      if (load.layer == metrics.layer) accumulate(builder, metrics.counts, load.counts, 1.0, first);
    }
    for (const auto& auxiliary : forward.auxiliary_losses) {
      if (auxiliary.layer != metrics.layer) continue;
      const ValueId target = auxiliary.kind == ForwardResult::AuxiliaryLoss::Kind::z_loss
                                 ? metrics.z_loss
                                 : metrics.load_balancing_loss;
      accumulate(builder, target, auxiliary.value, share / auxiliary.coefficient, first);
    }
  }
  builder.place = caller_place;
}

void build_update(Builder& builder, const ModelState& state, const TrainingStepOptions& options,
                  TrainingStep& step) {
  builder.place = Place{.phase = Phase::optimizer};
  std::vector<ValueId> gradients;
  for (const Parameter& parameter : state.parameters) {
    gradients.push_back(builder.state(parameter.gradient));
  }
  const ValueId norms = squared_norms(builder, gradients, "squared_norms");
  const ClipResult clip =
      clip_coefficient(builder, norms, {.max_norm = options.clip_grad}, "grad_norm");
  step.grad_norm = clip.norm;
  step.skipped = clip.skip;
  const AdamWScalars scalars{.learning_rate = step.learning_rate,
                             .weight_decay = step.weight_decay,
                             .step = step.update_number,
                             .coefficient = clip.coefficient,
                             .skip = clip.skip};
  for (const Parameter& parameter : state.parameters) {
    builder.place.layer = static_cast<int16_t>(parameter.layer);
    const AdamWTensors tensors{
        .parameter = builder.state(parameter.value),
        .gradient = builder.state(parameter.gradient),
        .exp_avg = builder.state(parameter.exp_avg),
        .exp_avg_sq = builder.state(parameter.exp_avg_sq),
        .master = parameter.master.valid() ? builder.state(parameter.master) : ValueId{}};
    adamw(builder, tensors, scalars,
          {.beta1 = options.adam_beta1,
           .beta2 = options.adam_beta2,
           .epsilon = options.adam_epsilon,
           .decay = parameter.decay},
          (*state.table)[parameter.value].name);
  }
}

InferenceStep build_inference(const ModelConfig& config, const ModelState& state, int32_t batch,
                              int32_t sequence, bool with_loss, bool keep_logits) {
  InferenceStep step;
  step.program = std::make_unique<Program>(state.table);
  Builder builder(*step.program);
  const DType wide = accumulation_dtype(compute_dtype(state));
  step.batch = declare_batch(builder, batch, sequence, with_loss, wide);
  if (with_loss) step.loss = builder.metric("loss", DType::f64, {1});
  if (!keep_logits) step.layers = declare_layer_metrics(builder, config, /*training=*/false);
  const ValueId rope = build_rope_table(builder, config, sequence, wide);
  const ForwardResult forward =
      build_forward(builder, config, state, rope, step.batch, /*training=*/false);
  if (keep_logits) {
    step.logits = forward.logits;
    step.program->add_result(forward.logits);
  }
  if (with_loss) accumulate_metrics(builder, forward, step.loss, step.layers, 0, 1);
  return step;
}

}  // namespace

TrainingStep build_training_step(const ModelConfig& config, const ModelState& state,
                                 const TrainingStepOptions& options) {
  TrainingStep step;
  step.program = std::make_unique<Program>(state.table);
  Builder builder(*step.program);
  const DType wide = accumulation_dtype(compute_dtype(state));

  step.learning_rate = builder.input("learning_rate", DType::f64, {1});
  step.weight_decay = builder.input("weight_decay", DType::f64, {1});
  step.update_number = builder.input("update_number", DType::i64, {1});
  step.loss = builder.metric("loss", DType::f64, {1});
  step.layers = declare_layer_metrics(builder, config, /*training=*/true);

  const ValueId rope = build_rope_table(builder, config, options.sequence, wide);
  // The gradient of the step's loss, which is the mean over micro-batches.
  const ValueId share = fill(builder, 1.0 / options.micro_batches, wide, {1}, "d_loss");

  MainGradients main_gradients(*state.table);
  for (int32_t micro_batch = 0; micro_batch < options.micro_batches; ++micro_batch) {
    builder.place = Place{.micro_batch = micro_batch};
    step.micro_batches.push_back(declare_batch(builder, options.micro_batch_size, options.sequence,
                                               /*with_labels=*/true, wide));
    const int32_t first = step.program->op_count();
    const ForwardResult forward =
        build_forward(builder, config, state, rope, step.micro_batches.back(), /*training=*/true);
    const int32_t last = step.program->op_count();
    accumulate_metrics(builder, forward, step.loss, step.layers, micro_batch,
                       options.micro_batches);

    std::vector<GradientSeed> seeds = {{forward.loss, share}};
    for (const auto& auxiliary : forward.auxiliary_losses)
      seeds.push_back({auxiliary.value, share});
    append_backward(builder, first, last, seeds, {}, main_gradients);
  }
  for (const Parameter& parameter : state.parameters) {
    TROUPE_CHECK(main_gradients.written[static_cast<size_t>(parameter.gradient.index)],
                 "no gradient reaches " + (*state.table)[parameter.value].name);
  }
  build_update(builder, state, options, step);
  return step;
}

InferenceStep build_evaluation_step(const ModelConfig& config, const ModelState& state,
                                    int32_t batch, int32_t sequence) {
  return build_inference(config, state, batch, sequence, /*with_loss=*/true, /*keep_logits=*/false);
}

InferenceStep build_logits_step(const ModelConfig& config, const ModelState& state, int32_t batch,
                                int32_t sequence, bool with_loss) {
  return build_inference(config, state, batch, sequence, with_loss, /*keep_logits=*/true);
}

}  // namespace troupe
