#include "passes/step_metrics.h"

#include <string>
#include <utility>

#include "ops/elementwise/fill/fill.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "passes/rank_sums.h"

namespace troupe {

std::vector<LayerMetrics> declare_layer_metrics(Builder& builder, const ModelConfig& config,
                                                bool training, bool ignore_padding, int32_t slots) {
  std::vector<LayerMetrics> layers;
  const int32_t count = training ? config.all_layers() : config.num_layers;
  for (int32_t layer = 0; layer < count; ++layer) {
    if (!config.is_owner(layer)) continue;
    LayerMetrics metrics;
    metrics.layer = layer;
    if (config.is_moe_layer(layer)) {
      metrics.counts = builder.metric("expert_rows", DType::f64, {config.num_experts});
      if (slots > 0) metrics.slots = builder.metric("slot_rows", DType::f64, {slots});
      metrics.entropy = builder.metric("router_entropy", DType::f64, {1});
      if (ignore_padding) metrics.tokens = builder.metric("valid_tokens", DType::f64, {1});
    }
    for (const AuxiliaryLossKind kind : kAuxiliaryLossKinds) {
      if (!training || coefficient_of(kind, config, layer) == 0) continue;
      metrics.losses.push_back({kind, builder.metric(std::string(name_of(kind)), DType::f64, {1})});
    }
    if (metrics.counts.valid() || !metrics.losses.empty()) layers.push_back(std::move(metrics));
  }
  return layers;
}

std::vector<LossMetric> declare_losses(Builder& builder, const ModelConfig& config,
                                       bool per_token_loss, TrainingStep& step) {
  std::vector<LossMetric> losses;
  for (int32_t depth = 0; depth <= config.mtp_num_layers; ++depth) {
    LossMetric loss{.sum = builder.metric(depth == 0 ? "loss" : "mtp_loss", DType::f64, {1}),
                    .tokens = {}};
    if (depth == 0) {
      step.loss = loss.sum;
    } else {
      step.mtp_losses.push_back(loss.sum);
    }
    // A loss per token is divided by the step's tokens from the start.
    if (!per_token_loss) loss.tokens = builder.metric("loss_tokens", DType::f64, {1});
    losses.push_back(loss);
  }
  return losses;
}

std::vector<ValueId> metrics_of(const std::vector<LossMetric>& losses,
                                const std::vector<LayerMetrics>& layers) {
  std::vector<ValueId> metrics;
  for (const LossMetric& loss : losses) metrics.insert(metrics.end(), {loss.sum, loss.tokens});
  for (const LayerMetrics& layer : layers) {
    metrics.insert(metrics.end(), {layer.counts, layer.slots, layer.entropy, layer.tokens});
    for (const LayerMetrics::Loss& each : layer.losses) metrics.push_back(each.value);
  }
  std::erase_if(metrics, [](ValueId metric) { return !metric.valid(); });
  return metrics;
}

void MetricSums::add(ValueId metric, ValueId value, double weight, ValueId factor) {
  accumulate(builder_, metric, value, weight, /*overwrite=*/written_.insert(metric.index).second,
             factor);
}

void MetricSums::add_largest(ValueId metric, ValueId value, double weight) {
  accumulate_largest(builder_, metric, value, weight,
                     /*overwrite=*/written_.insert(metric.index).second);
}

void MetricSums::add_nothing(ValueId metric) {
  if (!metric.valid() || written_.contains(metric.index)) return;
  const Shape shape = builder_.value(metric).shape;
  add(metric, fill(builder_, 0, DType::f64, shape, "nothing"), 1);
}

void declare_rooms(Builder& builder, const ModelConfig& config, const ModelPart& part,
                   const TrainingStepOptions& options, TrainingStep& step) {
  const bool may_lack = part.run->expert_room > 0 || options.stash.any();
  if (config.num_experts == 0 || dispatch_ranks(part) == 1 || options.expert_rounds || !may_lack) {
    return;
  }
  const auto metric = [&](const char* name) { return builder.metric(name, DType::f64, {1}); };
  step.rooms_lacked = metric("rooms_lacked");
  step.fullest_room = metric("fullest_room");
  if (!options.stash.any()) return;
  step.pages_lacked = metric("pages_lacked");
  step.most_pages = metric("most_pages");
}

void measure_rooms(Builder& builder, const ModelPart& part, const ForwardResult& forward,
                   ValueId lacked, ValueId fullest, MetricSums& sums) {
  const PlaceScope scope(builder);
  for (const auto& router : forward.routers) {
    if (!lacked.valid() || !router.over.valid()) continue;
    builder.place.layer = static_cast<int16_t>(router.layer);
    // The ranks that share the experts have the same answer.
    sums.add(lacked, router.over, 1.0 / dispatch_ranks(part));
    sums.add_largest(fullest, router.fullest, 1.0 / router.even);
  }
}

void accumulate_metrics(Builder& builder, const ModelConfig& config, const ModelPart& part,
                        const ForwardResult& forward, const std::vector<LossMetric>& losses,
                        const std::vector<LayerMetrics>& layers, MetricSums& sums, double share,
                        double loss_share) {
  const Layout& layout = part.layout();
  const double token_share = share / (layout.cp() * (part.sequence_parallel() ? layout.tp() : 1));
  const bool adds_loss = part.dense().tp == 0;
  for (size_t depth = 0; depth < forward.heads.size(); ++depth) {
    const Head& head = forward.heads[depth];
    const LossMetric& loss = losses[depth];
    const bool counts = loss.tokens.valid();
    for (const ValueId each : head.losses) {
      // The loss is over the tokens that the ranks of cp have together.
      sums.add(loss.sum, each, adds_loss ? (counts ? 1 : loss_share) : 0,
               counts ? head.loss_tokens : ValueId{});
    }
    if (counts) sums.add(loss.tokens, head.loss_tokens, adds_loss && part.dense().cp == 0 ? 1 : 0);
  }
  const PlaceScope scope(builder);
  for (const LayerMetrics& metrics : layers) {
    const int32_t uses = config.uses_of(metrics.layer);
    for (const auto& router : forward.routers) {
      if (config.owner_of(router.layer) != metrics.layer) continue;
      builder.place.layer = static_cast<int16_t>(router.layer);
      sums.add(metrics.counts, router.counts, 1.0);
      if (metrics.slots.valid()) sums.add(metrics.slots, router.slots, 1.0);
      const bool masked = router.valid.valid();
      sums.add(metrics.entropy, router.entropy, (masked ? share : token_share) / uses);
      if (!masked) continue;
      // The ranks of tp and cp have the same count.
      sums.add(metrics.tokens, router.valid, part.dense().tp == 0 && part.dense().cp == 0 ? 1 : 0);
    }
    for (const auto& auxiliary : forward.auxiliary_losses) {
      if (config.owner_of(auxiliary.layer) != metrics.layer) continue;
      builder.place.layer = static_cast<int16_t>(auxiliary.layer);
      for (const LayerMetrics::Loss& target : metrics.losses) {
        if (target.kind != auxiliary.kind) continue;
        sums.add(target.value, auxiliary.value,
                 share / (uses * coefficient_of(auxiliary.kind, config, auxiliary.layer)));
      }
    }
  }
}

void reduce_metrics(Builder& builder, const ModelState& state, const TrainingStep& step,
                    const std::vector<LossMetric>& losses, MetricSums& sums) {
  if (state.part.layout().world_size() == 1) return;
  std::vector<ValueId> metrics = metrics_of(losses, step.layers);
  if (step.rooms_lacked.valid()) metrics.push_back(step.rooms_lacked);
  for (const ValueId each : step.code_metrics) {
    if (each.valid()) metrics.push_back(each);
  }
  for (const ValueId metric : metrics) sums.add_nothing(metric);
  sum_metrics_over_ranks(builder, state, metrics);
}

}  // namespace troupe
