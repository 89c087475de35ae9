// Weights of copied experts: brought to the ranks that have the copies, and their gradients back.
// The ranks of a group hold E experts, L = E/n successive ones each by their place, and have N
// places for copies of others' (ops/routing/clone_placement).
//
// Kinds
//   clone_experts (W [L, ...], experts i32 [n N]) -> y [L + N, ...]
//       y[i] = W[i] for i < L, the rank's own experts. y[L + i] = the weights of expert
//       experts[r N + i] on the rank at place r, which its owner has; zeros where that is -1.
//       Floating-point.
//   return_clones (dy [L + N, ...], experts, target?) -> dW [L, ...]
//       dW[i] = dy[i] + the gradients of the expert's copies, in the order of places, summed in the
//       dtype of dy, which is an accumulation dtype. Places without a copy are not read. `target`
//       is the weights' main gradient, which the sum is stored in or added to, rounded to once
//       where it is bf16 (dy is f32); without it the sum is a new tensor.
// Both are collectives. No rank has a copy of its own expert, and `experts` is the same on all.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct CloneExpertsAttributes {
  RankGroup group = RankGroup::ep;
  int32_t ranks = 1;        // n
  bool accumulate = false;  // of return_clones, with a target: adds to it
};

// Emits on the group's queue.
ValueId clone_experts(Builder& builder, ValueId weight, ValueId experts,
                      const CloneExpertsAttributes& attributes, const std::string& name);

extern const OpSpec kCloneExperts;
extern const OpSpec kReturnClones;

}  // namespace troupe
