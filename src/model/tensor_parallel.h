// How the ranks of a tp group exchange rows around the products that they share.
//
// A pair of products is cut so that the first one's outputs, and with them the second one's inputs,
// are each rank's own: heads of attention, inner sizes of an MLP. Before the pair every rank needs
// the rows of all tokens; after it the ranks' results are parts of a sum. With sequence parallelism
// a rank keeps only its share of the rows between such pairs (flat rows in equal consecutive
// blocks): rows are gathered before and scattered, summed, after. Without it all ranks hold all
// rows (Shoeybi et al., 2019; Korthikanti et al., 2022; docs/layouts.md, "Slices").
//
// Emits nothing when the group has one rank. A builder's helper: valid as long as builder and part.
#pragma once

#include <string>

#include "model/model_part.h"
#include "program/builder.h"

namespace troupe {

class TensorParallel {
 public:
  TensorParallel(Builder& builder, const ModelPart& part)
      : builder_(builder),
        ranks_(part.layout().tp()),
        rank_(part.dense().tp),
        sequence_parallel_(part.sequence_parallel()) {}

  int32_t ranks() const { return ranks_; }
  int32_t rank() const { return rank_; }
  bool sequence_parallel() const { return sequence_parallel_; }

  // The rows of all tokens, for products whose outputs are cut.
  ValueId enter(ValueId rows, const std::string& name) const;
  // The sum of all ranks' results of products whose inputs are cut.
  ValueId leave(ValueId partial, const std::string& name) const;
  // The sum of all ranks' tensors, for work that is each rank's own again.
  ValueId sum_for_all(ValueId partial, const std::string& name) const;

 private:
  Builder& builder_;
  const int32_t ranks_;
  const int32_t rank_;
  const bool sequence_parallel_;
};

// Emits the second product of a pair, the sum over ranks, and the bias, if there is one.
ValueId leave_linear(Builder& builder, const TensorParallel& tensor_parallel, ValueId x,
                     ValueId weight, ValueId bias, const std::string& name);

}  // namespace troupe
