// What the ranks of a step add up after their last micro-batch: gradients, metrics, and the norm.
// All of them emit the same collectives, in the same order.
#pragma once

#include <set>
#include <span>

#include "model/parameters.h"
#include "program/builder.h"

namespace troupe {

// A program's metrics, which micro-batches add to. The first contribution stores.
class MetricSums {
 public:
  explicit MetricSums(Builder& builder) : builder_(builder) {}

  void add(ValueId metric, ValueId value, double weight);
  // For what other ranks contribute to and this one does not.
  void add_nothing(ValueId metric);

 private:
  Builder& builder_;
  std::set<int32_t> written_;  // by value
};

// Sums gradients over the ranks. `replicas`: the ranks that see other samples. They go layer by
// layer, the last one first: the order in which the backward pass completes them. Then come the
// copies of one parameter in several stages.
void reduce_gradients(Builder& builder, const ModelState& state, int32_t replicas);

// Sums metrics over the ranks, each of which has counted what no other has.
void reduce_metrics(Builder& builder, const ModelPart& part, int32_t replicas,
                    std::span<const ValueId> metrics, MetricSums& sums);

// The squares of all elements of the model's gradient, on whatever ranks they are: f64 [n], to be
// added up.
ValueId build_squares(Builder& builder, const ModelState& state);

}  // namespace troupe
