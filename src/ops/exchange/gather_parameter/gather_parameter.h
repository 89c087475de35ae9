// Parameters of which each rank keeps a shard (program/shard.h): the whole tensor for one use, and
// back from its gradient to the shard. The rank at place r of a group of n keeps shard r of n.
//
//   whole  = the shards of ranks 0, 1, ..., n - 1, one after the other
//   d_shard = elements of this shard of: sum over ranks r, in ascending order, of d_whole_r
//
// Kinds
//   gather_parameter        (shard) -> whole                     any dtype
//   sum_parameter_gradient  (d_whole, target?) -> d_shard        accumulation dtype
// Both are collectives. `target` is the main gradient of the shard, which the sum is stored in or
// added to, and rounded to once where it is bf16 (the terms are f32); without it the sum is a new
// tensor.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"
#include "program/shard.h"

namespace troupe {

struct GatherParameterAttributes {
  RankGroup group = RankGroup::dp_cp_within_instance;
  Shard shard = {};
  Shape shape = {};         // of the whole tensor
  bool accumulate = false;  // of sum_parameter_gradient, with a target: adds to it
};

// `shard`: as many elements as shape_of_shard(shape, shard) has, in any shape; empty where the rank
// has none. Emits on the group's queue. Returns [shape].
ValueId gather_parameter(Builder& builder, ValueId shard,
                         const GatherParameterAttributes& attributes, const std::string& name);

extern const OpSpec kGatherParameter;
extern const OpSpec kSumParameterGradient;

}  // namespace troupe
