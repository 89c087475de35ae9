// Prefix sum over the ranks of a group (MPI's inclusive scan), together with the sum over all:
//
//   running[i] = previous[i] + sum of counts_r[i] over the ranks r up to this one
//   total[i]   = previous[i] + sum of counts_r[i] over all ranks
//
// where `previous` is 0 when absent. With `previous` the total of the micro-batch before, the
// running sums are those that one rank would have that ran all ranks' micro-batches itself, rank
// after rank: what global_aux_loss counts (ops/routing/count_experts).
//
// Kinds
//   prefix_sum (counts, previous or -) -> running, total
// All i32, of one shape, not ragged. Integers that stay on the device; there is no derivative.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct PrefixSumAttributes {
  RankGroup group = RankGroup::dp;
};

struct PrefixSumResult {
  ValueId running;
  ValueId total;
};

// Emits the sum on the group's queue.
PrefixSumResult prefix_sum(Builder& builder, ValueId counts, ValueId previous,
                           const PrefixSumAttributes& attributes, const std::string& name);

extern const OpSpec kPrefixSum;

}  // namespace troupe
