// Sum over ranks: the sum of the tensors of all ranks of a group, as a new tensor, on every rank:
//
//   y[i] = sum over ranks r, in ascending order, of x_r[i]
//
// in the accumulation dtype, rounded once.
//
// Kinds
//   sum_over_ranks (x) -> y like x
// Floating-point or i32, not ragged; every rank passes a tensor of the same type. All ranks get the
// same bits. What comes after it is the same work on every rank of the group, done once; so the
// gradient that arrives there is handed on as it is. Its counterpart is copy_to_ranks.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct SumOverRanksAttributes {
  RankGroup group = RankGroup::tp;
};

// Emits the collective on the group's queue.
ValueId sum_over_ranks(Builder& builder, ValueId x, const SumOverRanksAttributes& attributes,
                       const std::string& name);

extern const OpSpec kSumOverRanks;

}  // namespace troupe
