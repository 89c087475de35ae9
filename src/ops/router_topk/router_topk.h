// Router top-k: chooses k experts for each token and computes the weights with which their results
// are added (semantics of Megatron Core's router, without groups and expert bias).
//
// For the logits z of a token, the k largest logits are selected; equal logits: the lower expert
// first. The slots of the result are in descending order of the score. With the softmax score
// function and scaling factor g:
//   post-softmax (default):  p_s = g * exp(z_s) / sum over the selected j of exp(z_j)
//   pre-softmax:             p_s = g * exp(z_s) / sum over all experts e of exp(z_e)
// Pre-softmax weights are not renormalised. With k = 1 post-softmax weights are g whatever the
// logits are, and the router would learn nothing from them.
//
// Indices are always k distinct experts, also where logits are NaN.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// How logits become scores.
enum class ScoreFunction : uint8_t { softmax, sigmoid, sqrtsoftplus };
std::string_view name_of(ScoreFunction function);

struct RouterTopkAttributes {
  int32_t top_k = 0;  // 1 <= k <= E
  ScoreFunction score_function = ScoreFunction::softmax;
  bool pre_softmax = false;
  double scaling_factor = 1;  // not 0
};

struct RouterTopkResult {
  ValueId probabilities;  // [T, k], dtype of the logits
  ValueId indices;        // i32 [T, k], each in [0, E)
};

// `logits`: [T, E], f32 or f64 (the accumulation dtype). Results are named `name` and name.indices.
RouterTopkResult router_topk(Builder& builder, ValueId logits,
                             const RouterTopkAttributes& attributes, const std::string& name);

// Inputs: logits. Outputs: probabilities, indices.
extern const OpSpec kRouterTopk;

struct RouterTopkGradientAttributes {
  RouterTopkAttributes forward;
  int32_t experts = 0;
};

// The gradient of the logits. With P = probabilities, d = their gradient:
//   post-softmax:  dz_i = P_i (d_i - (1/g) sum_j P_j d_j) for selected i, 0 for others
//   pre-softmax:   dz_i = [i selected] P_i d_i - q_i sum_j P_j d_j for all i, with q = softmax(z),
// where the sums run over the k slots.
// Inputs: d_probabilities [T, k], logits [T, E] (pre-softmax only; absent otherwise), probabilities
// [T, k], indices i32 [T, k]. Output: d_logits [T, E].
extern const OpSpec kRouterTopkGradient;

}  // namespace troupe
