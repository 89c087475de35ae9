// What the ranks of a layout do together at the end of a training step: sums of the gradients, of
// their squares and of what was measured; with the distributed optimizer, the exchange of what each
// rank has updated.
//
// A rank's gradient is the exact derivative of the whole step's loss with respect to its slice of a
// parameter, as far as its own tokens go. The sum over the ranks that hold the same slice is the
// whole derivative; no divisors but the one in the loss (semantics 11; the groups are those of
// Layout::reduction_of). All functions emit operations at the builder's place.
#pragma once

#include <span>

#include "model/parameters.h"
#include "program/builder.h"

namespace troupe {

// Sums the main gradients, layer by layer, the last one first: the order in which the backward pass
// completes them. Successive layers share one meeting of the ranks (a bucket) until their gradients
// have `bucket_elements`; 0: each layer has its own. Emits nothing for one rank. With the
// distributed optimizer only the rank's shard of a gradient is the sum; the rest of it is no longer
// of use. Shards of sharded parameters have been summed by the backward pass.
void sum_gradients_over_ranks(Builder& builder, const ModelState& state, int64_t bucket_elements);

// The square of the norm of all gradients of the model, once summed: every element of the model
// counts once, whoever holds it. f64 [1], the same bits on all ranks.
ValueId squared_gradient_norm(Builder& builder, const ModelState& state);

// With the distributed optimizer, gives every rank the shards of these parameters that others have
// updated.
void gather_parameters_over_ranks(Builder& builder, const ModelState& state,
                                  std::span<const Parameter> parameters);

// Sums metrics over all ranks, of which each has a part. Emits nothing for one rank.
void sum_metrics_over_ranks(Builder& builder, const ModelState& state,
                            std::span<const ValueId> metrics);

}  // namespace troupe
