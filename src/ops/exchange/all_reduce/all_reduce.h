// All-reduce: replaces tensors by their sums over the ranks of a group, in place:
//
//   t[i] = sum over ranks r, in ascending order, of t_r[i]
//
// Kinds
//   all_reduce (t0, t1, ...) -> t0, t1, ...
// Any number of tensors at once, so that many small ones are fused into one collective. Each is
// f64, f32, bf16 (summed in f32, rounded once) or i32, not ragged, and state or a metric; every
// rank passes tensors of the same dtypes and sizes in the same order. All ranks get the same bits.
// There is no derivative: what is reduced here are gradients and measurements, after the backward
// pass.
#pragma once

#include <span>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"
#include "program/shard.h"

namespace troupe {

struct AllReduceAttributes {
  RankGroup group = RankGroup::dp_cp;
  int64_t first_row = 0;  // only rows (of the first dimension) from here on are summed
  Shard shard = {};       // of each tensor only these elements are; with first_row 0
};

// Of the elements of a tensor that are summed, those that the rank at `place` of `ranks` sums on a
// GPU and hands to all.
inline IndexRange all_reduce_share(const Shape& shape, const AllReduceAttributes& attributes,
                                   int place, int ranks) {
  IndexRange summed = shard_of(shape, attributes.shard);
  if (attributes.first_row > 0) summed.begin = attributes.first_row * shape.row_elements();
  const IndexRange share = share_of(summed.end - summed.begin, place, ranks);
  return {summed.begin + share.begin, summed.begin + share.end};
}

// Emits the reduction on the group's queue.
void all_reduce(Builder& builder, std::span<const ValueId> tensors,
                const AllReduceAttributes& attributes);

extern const OpSpec kAllReduce;

}  // namespace troupe
