// Router top-k: chooses k experts for each token and computes the weights with which their results
// are added (the semantics of Megatron Core's router).
//
// A score function makes scores s of the logits z of a token; g is the scaling factor:
//   softmax, post (default)  p_i = g exp(z_i) / sum over the selected j of exp(z_j)
//   softmax, pre             p_i = g exp(z_i) / sum over all experts e of exp(z_e)
//   sigmoid                  s_i = 1 / (1 + exp(-z_i))
//   sqrtsoftplus             s_i = sqrt(log(1 + exp(z_i)))
// and for the last two p_i = g s_i / (sum over the selected j of s_j + 1e-20), or g s_i when k = 1
// or weights are not to be normalised.
// Pre-softmax weights are not renormalised. With k = 1 post-softmax weights are g whatever the
// logits are, and the router would learn nothing from them.
//
// Selection. What is compared is the score, plus the expert's bias where there is one; bias enters
// nothing but this choice. As score functions are increasing, the logits themselves stand for the
// scores where nothing is added to them: rounding cannot make them equal. Equal scores: the lower
// expert first. The slots of the result are in descending order of what was compared.
//   Groups: the experts form `num_groups` runs of equal length. A group's score is the sum of its
// `group_scores` largest scores (biased ones with bias, raw logits with post-softmax). Only
// experts of the `group_topk` best groups are selected; of equal groups the lower one is better.
//
// Selected experts. With the input `selected` nothing is chosen: the weights are computed at these
// experts (replay of recorded routing, or a selection made by another operation), and the slots are
// in the order given. They are trusted: the k experts of a token are distinct and in [0, E).
//
// Indices are always k distinct experts, also where logits or biases are NaN: NaN counts as
// -infinity.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ops/routing/router_topk/score_function.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct RouterTopkAttributes {
  int32_t top_k = 0;  // 1 <= k <= E
  ScoreFunction score_function = ScoreFunction::softmax;
  bool pre_softmax = false;   // of softmax only; other functions ignore it
  double scaling_factor = 1;  // not 0
  int32_t num_groups = 0;     // 0: no groups; otherwise a divisor of E
  int32_t group_topk = 0;     // of 0 with groups: k at the most, and enough to hold k experts
  int32_t group_scores = 0;   // 0: floor(k / group_topk), as in Megatron
  bool normalize = true;      // weights of sigmoid and sqrtsoftplus
  std::optional<DType> probability_dtype = {};  // that of the logits, or f32 (default: the former)

  constexpr int32_t scores_of_group() const {
    return group_scores > 0 ? group_scores : top_k / group_topk;
  }
  // Are weights divided by the sum of the selected experts' scores?
  constexpr bool divides_by_scores() const { return normalize && top_k > 1; }
};

struct RouterTopkInputs {
  ValueId logits = {};       // [T, E], f32 or f64
  ValueId expert_bias = {};  // optional: f32 [E], whatever the logits are; not for softmax
  ValueId selected = {};     // optional: i32 [T, k]; not together with expert_bias
};

struct RouterTopkResult {
  ValueId probabilities;  // [T, k], probability_dtype: computed like the logits, rounded once
  ValueId indices;        // i32 [T, k], each in [0, E)
};

// Results are named `name` and name.indices.
RouterTopkResult router_topk(Builder& builder, const RouterTopkInputs& inputs,
                             const RouterTopkAttributes& attributes, const std::string& name);

// Inputs: logits, expert_bias, selected. Outputs: probabilities, indices.
extern const OpSpec kRouterTopk;

struct RouterTopkGradientAttributes {
  RouterTopkAttributes forward;
  int32_t experts = 0;
  DType logits_dtype = DType::f32;
};

// The gradient of the logits, in their dtype. With P = probabilities, d = their gradient:
//   softmax, post:  dz_i = P_i (d_i - (1/g) sum_j P_j d_j) for selected i
//   softmax, pre:   dz_i = [i selected] P_i d_i - q_i sum_j P_j d_j for all i, with q = softmax(z)
//   others:         dz_i = (g/a) (d_i - sum_j d_j s_j / a) s'(z_i) for selected i, with
//                   a = sum_j s_j + 1e-20; not normalised, or k = 1: g d_i s'(z_i)
//                   s' = s (1 - s) for sigmoid, sigmoid(z) / (2 s) for sqrtsoftplus
// where the sums run over the k slots, in whatever order these are. Experts that are not selected
// get 0 where nothing else is said.
// Inputs: d_probabilities [T, k], logits [T, E] (absent for post-softmax), probabilities [T, k]
// (for post-softmax only), indices i32 [T, k]. Output: d_logits [T, E].
extern const OpSpec kRouterTopkGradient;

}  // namespace troupe
