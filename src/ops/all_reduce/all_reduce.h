// All-reduce: replaces tensors by their sums over the ranks of a group, in place:
//
//   t[i] = sum over ranks r, in ascending order, of t_r[i]
//
// Kinds
//   all_reduce (t0, t1, ...) -> t0, t1, ...
// Any number of tensors at once, so that many small ones cost one meeting of the ranks. Each is
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

// Emits the reduction on the communication queue.
void all_reduce(Builder& builder, std::span<const ValueId> tensors,
                const AllReduceAttributes& attributes);

extern const OpSpec kAllReduce;

}  // namespace troupe
