// What training and evaluation programs measure, and how the parts that micro-batches, stages and
// ranks contribute add up. All functions emit operations at the builder's place.
#pragma once

#include <set>
#include <vector>

#include "model/parameters.h"
#include "passes/training_step.h"
#include "program/builder.h"

namespace troupe {

// The metrics of all MoE layers, losses in training alone. `slots`: ModelPart::expert_slots or 0.
std::vector<LayerMetrics> declare_layer_metrics(Builder& builder, const ModelConfig& config,
                                                bool training, bool ignore_padding, int32_t slots);

// The loss of a step. Where `tokens` is valid, `sum` becomes the sum over the tokens that count, of
// which `tokens` is the number, both f64 [1]; otherwise the weighted sum of the micro-batches'.
struct LossMetric {
  ValueId sum;
  ValueId tokens;
};

// Those of a training step, by depth.
std::vector<LossMetric> declare_losses(Builder& builder, const ModelConfig& config,
                                       bool per_token_loss, TrainingStep& step);

// All that a step measures. Losses are by depth, those of multi-token prediction after the first.
std::vector<ValueId> metrics_of(const std::vector<LossMetric>& losses,
                                const std::vector<LayerMetrics>& layers);

// The step's metrics, which micro-batches add to. The first contribution stores.
class MetricSums {
 public:
  explicit MetricSums(Builder& builder) : builder_(builder) {}

  // `factor`: [1], or absent.
  void add(ValueId metric, ValueId value, double weight, ValueId factor = {});

  // The largest contribution instead of the sum.
  void add_largest(ValueId metric, ValueId value, double weight);

  // For what other ranks contribute to and this one does not. Nothing where there is no metric.
  void add_nothing(ValueId metric);

 private:
  Builder& builder_;
  std::set<int32_t> written_;
};

// The metrics of `step` that say whether the experts' room suffices, where it may not.
void declare_rooms(Builder& builder, const ModelConfig& config, const ModelPart& part,
                   const TrainingStepOptions& options, TrainingStep& step);

// Adds to `lacked` for how many MoE blocks of a micro-batch the experts had too little room, and
// finds in `fullest` the most that they needed, times an even load; both where they are valid.
void measure_rooms(Builder& builder, const ModelPart& part, const ForwardResult& forward,
                   ValueId lacked, ValueId fullest, MetricSums& sums);

// Adds what one stage of this rank measured of one micro-batch to the step's metrics, so that the
// sum over all ranks counts everything once: the ranks of a tp group have the same loss, and of
// means over the tokens each has its part. `share` is the weight of one of the micro-batches,
// `loss_share` that of its loss where its tokens are not counted.
void accumulate_metrics(Builder& builder, const ModelConfig& config, const ModelPart& part,
                        const ForwardResult& forward, const std::vector<LossMetric>& losses,
                        const std::vector<LayerMetrics>& layers, MetricSums& sums, double share,
                        double loss_share);

// Sums metrics over the ranks, each of which has counted what no other has.
void reduce_metrics(Builder& builder, const ModelState& state, const TrainingStep& step,
                    const std::vector<LossMetric>& losses, MetricSums& sums);

}  // namespace troupe
