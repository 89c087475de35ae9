// Weights of copied experts: brought to the ranks that have the copies, and their gradients back.
// The ranks of a group hold E experts, L = E/n successive ones each by their place, and have N
// places for copies of others' (ops/routing/clone_placement).
//
// Kinds
//   clone_experts (W [L, ...], experts i32 [n N]) -> y [N, ...]
//       y[i] = the weights of expert experts[r N + i] on the rank at place r, which its owner has
//       in its W; zeros where that is -1. Floating-point.
//   return_clones (dy [N, ...], experts, target?) -> dW [L, ...]
//       dW[i] = the gradients of the copies of the rank's expert i, in the order of places, summed
//       in the dtype of dy, which is an accumulation dtype; 0 for one without copies. Places
//       without a copy are not read. `target` is the weights' main gradient, which the sums are
//       stored in or added to, rounded to once where it is bf16 (dy is f32): the gradient of an
//       expert without copies is left alone then. Without it they are a new tensor.
// Both are collectives. No rank has a copy of its own expert, and `experts` is the same on all.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct CloneExpertsAttributes {
  RankGroup group = RankGroup::ep;
  int32_t ranks = 1;        // n
  int32_t own = 1;          // L
  bool accumulate = false;  // of return_clones, with a target: adds to it
};

// Emits on the group's queue. `own` is taken from the weight.
ValueId clone_experts(Builder& builder, ValueId weight, ValueId experts,
                      CloneExpertsAttributes attributes, const std::string& name);

extern const OpSpec kCloneExperts;
extern const OpSpec kReturnClones;

}  // namespace troupe
