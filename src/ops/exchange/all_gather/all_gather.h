// All-gather: the rows of all ranks of a group, one rank's after the other's:
//
//   y[r * R + i] = x_r[i]      for ranks r = 0, 1, ... of the group and rows i < R
//
// Kinds
//   all_gather (x [R, ...]) -> y [ranks * R, ...]
// Any dtype, not ragged; every rank passes a tensor of the same type. All ranks get the same bits.
// The derivative is reduce_scatter: each rank's rows went to all ranks, so their gradient is the
// sum over the ranks. Integers have none.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct AllGatherAttributes {
  RankGroup group = RankGroup::tp;
  int32_t ranks = 1;  // of the group
};

// Emits the collective on the group's queue.
ValueId all_gather(Builder& builder, ValueId x, const AllGatherAttributes& attributes,
                   const std::string& name);

extern const OpSpec kAllGather;

}  // namespace troupe
