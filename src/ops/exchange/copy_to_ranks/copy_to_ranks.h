// Copy to ranks: marks the place where a tensor that is the same on all ranks of a group goes into
// work that the ranks share. Nothing is sent: every rank has the tensor already. Each rank's work
// gives a part of its gradient only, so the derivative is sum_over_ranks.
//
// Kinds
//   copy_to_ranks (x) -> y like x, with the same elements
// Floating-point, not ragged.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct CopyToRanksAttributes {
  RankGroup group = RankGroup::tp;
};

ValueId copy_to_ranks(Builder& builder, ValueId x, const CopyToRanksAttributes& attributes,
                      const std::string& name);

extern const OpSpec kCopyToRanks;

}  // namespace troupe
