// What the ranks of a layout do together at the end of a training step: sums of the gradients, of
// their squares and of what was measured; with the distributed optimizer, the exchange of what each
// rank has updated.
//
// A rank's gradient is the exact derivative of the whole step's loss with respect to its slice of a
// parameter, as far as its own tokens go. The sum over the ranks that hold the same slice is the
// whole derivative; the only divisor is the one in the loss (docs/layouts.md, "Gradients"; groups:
// Layout::reduction_of). All functions emit operations at the builder's place.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "model/parameters.h"
#include "program/builder.h"

namespace troupe {

// What one rank has to do with a parameter's gradient, where not all that hold one do the same.
struct GradientDuty {
  bool counts = false;  // its squares are the rank's to add to the norm
  // Of the rows that the rank has, the first that other ranks of its tp group hold, too; nothing
  // when there are none. If another rank leads these, only the rows before it count here.
  std::optional<int64_t> first_shared_row;
  bool leads_shared = true;
  auto operator<=>(const GradientDuty&) const = default;
};
GradientDuty gradient_duty(const Parameter& parameter, const ModelPart& part);

// Sums the main gradients, layer by layer, the last one first: the order in which the backward pass
// completes them. Successive layers share one fused collective (a bucket) until their gradients
// have `bucket_elements`; 0: each layer has its own. Emits nothing for one rank. With the
// distributed optimizer only the rank's shard of a gradient is the sum; the rest of it is no longer
// of use. Shards of sharded parameters have been summed by the backward pass.
void sum_gradients_over_ranks(Builder& builder, const ModelState& state, int64_t bucket_elements);

// The square of the norm of all gradients of the model, once summed: every element of the model
// counts once, however many ranks hold it. f64 [1], the same bits on all ranks.
ValueId squared_gradient_norm(Builder& builder, const ModelState& state);

// How many of the gradients' elements are 0, and the square of the norm of the weights (of the
// master weights, where there are any), counted in the same way.
ValueId zero_gradients(Builder& builder, const ModelState& state);
ValueId squared_parameter_norm(Builder& builder, const ModelState& state);

// With the distributed optimizer, gives every rank the shards of these parameters that others have
// updated.
void gather_parameters_over_ranks(Builder& builder, const ModelState& state,
                                  std::span<const Parameter> parameters);

// Sums metrics over all ranks, of which each has a part. Emits nothing for one rank.
void sum_metrics_over_ranks(Builder& builder, const ModelState& state,
                            std::span<const ValueId> metrics);

}  // namespace troupe
