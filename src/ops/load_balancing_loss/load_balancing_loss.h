// Load-balancing loss (the auxiliary loss of Switch Transformer, as Megatron Core computes it):
// small when the router's average scores and the tokens that experts receive are spread evenly.
//   L = c * E / (k * T^2) * sum_e (sum_t q_te) * n_e,   q_t = softmax(z_t) over all E experts
// with logits z, counts n of the tokens routed to each expert, and coefficient c. With uniform
// scores and balanced counts L is exactly c.
//
// The scores are those of the clean logits, whatever the routing did with them (pre- or
// post-softmax, bias, groups, dropping). Counts carry no gradient. When counts are summed over
// several ranks the T^2 of the formula is that of all these ranks' tokens: with m equal ranks the
// caller passes c / m^2.
#pragma once

#include <string>

#include "ops/router_topk/router_topk.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct LoadBalancingLossAttributes {
  double coefficient = 0;
  int32_t top_k = 1;
  ScoreFunction score_function = ScoreFunction::softmax;
};

// `logits`: [T, E], f32 or f64; `counts`: i32 [E]. Returns the loss, [1] of the logits' dtype.
ValueId load_balancing_loss(Builder& builder, ValueId logits, ValueId counts,
                            const LoadBalancingLossAttributes& attributes, const std::string& name);

// Inputs: logits, counts. Output: loss [1].
extern const OpSpec kLoadBalancingLoss;

// dz_ti = d_loss * c * E / (k * T^2) * q_ti * (n_i - sum_e q_te n_e).
// Inputs: logits, counts, d_loss [1]. Output: d_logits [T, E].
extern const OpSpec kLoadBalancingLossGradient;

}  // namespace troupe
