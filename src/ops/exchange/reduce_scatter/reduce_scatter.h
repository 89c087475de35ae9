// Reduce-scatter: sums the ranks' tensors, and leaves to each rank its block of rows of the sum:
//
//   y[i] = sum over ranks s, in ascending order, of x_s[r * R + i]
//
// on rank r of the group, in the accumulation dtype, rounded once.
//
// Kinds
//   reduce_scatter (x [ranks * R, ...]) -> y [R, ...]
// Floating-point or i32, not ragged; every rank passes a tensor of the same type. The derivative is
// all_gather: every rank's term entered the rows of all ranks.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct ReduceScatterAttributes {
  RankGroup group = RankGroup::tp;
  int32_t ranks = 1;  // of the group
};

// Emits the collective on the group's queue.
ValueId reduce_scatter(Builder& builder, ValueId x, const ReduceScatterAttributes& attributes,
                       const std::string& name);

extern const OpSpec kReduceScatter;

}  // namespace troupe
