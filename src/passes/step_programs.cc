#include "passes/step_programs.h"

#include "ops/accumulate/accumulate.h"
#include "ops/adamw/adamw.h"
#include "ops/expert_bias_update/expert_bias_update.h"
#include "ops/fill/fill.h"
#include "ops/gradient_norm/gradient_norm.h"
#include "passes/autodiff.h"
#include "passes/rank_sums.h"

namespace troupe {
namespace {

std::vector<LayerMetrics> declare_layer_metrics(Builder& builder, const ModelConfig& config,
                                                bool training) {
  std::vector<LayerMetrics> layers;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe_layer(layer)) continue;
    LayerMetrics metrics;
    metrics.layer = layer;
    metrics.counts = builder.metric("expert_rows", DType::f64, {config.num_experts});
    metrics.entropy = builder.metric("router_entropy", DType::f64, {1});
    for (const AuxiliaryLossKind kind : kAuxiliaryLossKinds) {
      if (!training || coefficient_of(kind, config) == 0) continue;
      metrics.losses.push_back({kind, builder.metric(std::string(name_of(kind)), DType::f64, {1})});
    }
    layers.push_back(std::move(metrics));
  }
  return layers;
}

// Adds what this rank measured of one micro-batch to the step's metrics, so that the sum over all
// ranks counts everything once: the ranks of a tp group have the same loss, and of means over the
// tokens each has its part.
void accumulate_metrics(Builder& builder, const ModelConfig& config, const ModelPart& part,
                        const ForwardResult& forward, ValueId loss,
                        const std::vector<LayerMetrics>& layers, bool first, double share) {
  const Layout& layout = part.layout();
  const double token_share = share / (layout.cp() * (part.sequence_parallel() ? layout.tp() : 1));
  accumulate(builder, loss, forward.loss, part.dense().tp == 0 ? share : 0, first);
  const Place caller_place = builder.place;
  for (const LayerMetrics& metrics : layers) {
    builder.place.layer = static_cast<int16_t>(metrics.layer);
    for (const auto& router : forward.routers) {
      if (router.layer != metrics.layer) continue;
      accumulate(builder, metrics.counts, router.counts, 1.0, first);
      accumulate(builder, metrics.entropy, router.entropy, token_share, first);
    }
    for (const auto& auxiliary : forward.auxiliary_losses) {
      if (auxiliary.layer != metrics.layer) continue;
      for (const LayerMetrics::Loss& target : metrics.losses) {
        if (target.kind != auxiliary.kind) continue;
        accumulate(builder, target.value, auxiliary.value,
                   share / coefficient_of(auxiliary.kind, config), first);
      }
    }
  }
  builder.place = caller_place;
}

// Tokens of a micro-batch that this rank's routers see, of `rows` in each of `batch` sequences.
int64_t router_tokens(const ModelPart& part, int32_t batch, int32_t rows) {
  return int64_t{batch} * rows / (part.sequence_parallel() ? part.layout().tp() : 1);
}

// The experts that one micro-batch must use, as inputs, by layer. Empty when it chooses by itself.
std::vector<ValueId> declare_selections(Builder& builder, const ModelConfig& config, int64_t tokens,
                                        RoutingTrace trace) {
  if (trace != RoutingTrace::replayed) return {};
  std::vector<ValueId> selections(static_cast<size_t>(config.num_layers));
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe_layer(layer)) continue;
    selections[static_cast<size_t>(layer)] =
        builder.input("selected", DType::i32, {tokens, config.moe_router_topk});
  }
  return selections;
}

// What one micro-batch chose, as results of the program, by layer.
std::vector<ValueId> record_selections(Program& program, const ModelConfig& config,
                                       const ForwardResult& forward) {
  std::vector<ValueId> selections(static_cast<size_t>(config.num_layers));
  for (const auto& router : forward.routers) {
    program.add_result(router.selected);
    selections[static_cast<size_t>(router.layer)] = router.selected;
  }
  return selections;
}

void reduce_over_ranks(Builder& builder, const ModelState& state, const TrainingStep& step) {
  sum_gradients_over_ranks(builder, state);
  std::vector<ValueId> metrics = {step.loss};
  for (const LayerMetrics& layer : step.layers) {
    metrics.push_back(layer.counts);
    metrics.push_back(layer.entropy);
    for (const LayerMetrics::Loss& loss : layer.losses) metrics.push_back(loss.value);
  }
  sum_metrics_over_ranks(builder, state, metrics);
}

void build_update(Builder& builder, const ModelConfig& config, const ModelState& state,
                  const TrainingStepOptions& options, TrainingStep& step) {
  const ValueId norm = squared_gradient_norm(builder, state);
  const ClipResult clip =
      clip_coefficient(builder, norm, {.max_norm = options.clip_grad}, "grad_norm");
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
  for (const LayerMetrics& metrics : step.layers) {
    const StateId expert_bias = state.expert_biases[static_cast<size_t>(metrics.layer)];
    if (!expert_bias.valid()) continue;
    builder.place.layer = static_cast<int16_t>(metrics.layer);
    expert_bias_update(builder, builder.state(expert_bias), metrics.counts, clip.skip,
                       {.rate = config.moe_router_bias_update_rate});
  }
}

InferenceStep build_inference(const ModelConfig& config, const ModelState& state, int32_t batch,
                              int32_t sequence, bool with_loss, bool keep_logits,
                              RoutingTrace trace) {
  InferenceStep step;
  step.program = std::make_unique<Program>(state.table);
  Builder builder(*step.program);
  const DType wide = accumulation_dtype(state.dtype);
  const int32_t rows = sequence / state.part.layout().cp();
  step.batch = declare_batch(builder, batch, rows, with_loss, wide);
  if (with_loss) step.loss = builder.metric("loss", DType::f64, {1});
  if (!keep_logits) step.layers = declare_layer_metrics(builder, config, /*training=*/false);
  const ValueId rope = build_rope_table(builder, config, state.part, rows, wide);
  step.selected =
      declare_selections(builder, config, router_tokens(state.part, batch, rows), trace);
  const ForwardResult forward =
      build_forward(builder, config, state, rope, step.batch, {.selected = step.selected});
  if (trace == RoutingTrace::recorded) {
    step.selected = record_selections(*step.program, config, forward);
  }
  if (keep_logits) {
    step.logits = forward.logits;
    step.program->add_result(forward.logits);
  }
  if (with_loss)
    accumulate_metrics(builder, config, state.part, forward, step.loss, step.layers, /*first=*/true,
                       /*share=*/1.0);
  return step;
}

}  // namespace

TrainingStep build_training_step(const ModelConfig& config, const ModelState& state,
                                 const TrainingStepOptions& options) {
  TrainingStep step;
  step.program = std::make_unique<Program>(state.table);
  Builder builder(*step.program);
  const DType wide = accumulation_dtype(state.dtype);

  step.learning_rate = builder.input("learning_rate", DType::f64, {1});
  step.weight_decay = builder.input("weight_decay", DType::f64, {1});
  step.update_number = builder.input("update_number", DType::i64, {1});
  if (draws_random_numbers(config)) {
    step.step_number = builder.input("step_number", DType::i64, {1});
  }
  step.loss = builder.metric("loss", DType::f64, {1});
  step.layers = declare_layer_metrics(builder, config, /*training=*/true);

  const int32_t rows = options.sequence / state.part.layout().cp();
  const ValueId rope = build_rope_table(builder, config, state.part, rows, wide);
  // The step's loss is the mean over the micro-batches of all ranks.
  const int32_t data_parallel_size = state.part.layout().dp();
  const double share = 1.0 / (options.micro_batches * data_parallel_size);
  const ValueId d_loss = fill(builder, share, wide, {1}, "d_loss");

  MainGradients main_gradients(*state.table);
  std::vector<ValueId> running_counts(static_cast<size_t>(config.num_layers));
  for (int32_t micro_batch = 0; micro_batch < options.micro_batches; ++micro_batch) {
    builder.place = Place{.micro_batch = micro_batch};
    step.micro_batches.push_back(declare_batch(builder, options.micro_batch_size, rows,
                                               /*with_labels=*/true, wide));
    std::vector<ValueId> selected = declare_selections(
        builder, config, router_tokens(state.part, options.micro_batch_size, rows),
        options.routing_trace);
    const int32_t first = step.program->op_count();
    const ForwardResult forward =
        build_forward(builder, config, state, rope, step.micro_batches.back(),
                      {.training = true,
                       .micro_batch = state.part.global_micro_batch(micro_batch),
                       .data_parallel_size = data_parallel_size,
                       .dispatcher = options.dispatcher,
                       .context_exchange = options.context_exchange,
                       .seed = options.seed,
                       .step = step.step_number,
                       .selected = selected,
                       .running_counts = &running_counts});
    if (options.routing_trace == RoutingTrace::recorded) {
      selected = record_selections(*step.program, config, forward);
    }
    step.selected.push_back(std::move(selected));
    const int32_t last = step.program->op_count();
    accumulate_metrics(builder, config, state.part, forward, step.loss, step.layers,
                       micro_batch == 0, share);

    std::vector<GradientSeed> seeds = {{forward.loss, d_loss}};
    for (const auto& auxiliary : forward.auxiliary_losses)
      seeds.push_back({auxiliary.value, d_loss});
    append_backward(builder, first, last, seeds, {}, main_gradients);
  }
  for (const Parameter& parameter : state.parameters) {
    TROUPE_CHECK(main_gradients.written[static_cast<size_t>(parameter.gradient.index)],
                 "no gradient reaches " + (*state.table)[parameter.value].name);
  }
  builder.place = Place{.phase = Phase::optimizer};
  reduce_over_ranks(builder, state, step);
  build_update(builder, config, state, options, step);
  return step;
}

InferenceStep build_evaluation_step(const ModelConfig& config, const ModelState& state,
                                    int32_t batch, int32_t sequence) {
  return build_inference(config, state, batch, sequence, /*with_loss=*/true, /*keep_logits=*/false,
                         RoutingTrace::none);
}

InferenceStep build_logits_step(const ModelConfig& config, const ModelState& state, int32_t batch,
                                int32_t sequence, bool with_loss, RoutingTrace trace) {
  return build_inference(config, state, batch, sequence, with_loss, /*keep_logits=*/true, trace);
}

}  // namespace troupe
