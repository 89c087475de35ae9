// Router z-loss (ST-MoE): keeps the router's logits small,
//   L = c * mean over tokens t of (log sum_e exp(z_te))^2.
// With ValidTokens it is the sum over the tokens here that count, divided by the count of all ranks
// (at least 1): a rank's part of the mean. (Megatron Core divides by the rank's own count, so that
// its loss depends on how padding is spread over the ranks of TP and CP.)
#pragma once

#include <string>

#include "ops/losses/router_loss/router_loss.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct RouterZLossAttributes {
  double coefficient = 0;
};

// `logits`: [T, E], f32 or f64. Returns the loss, [1] of the logits' dtype.
ValueId router_z_loss(Builder& builder, ValueId logits, const RouterZLossAttributes& attributes,
                      const std::string& name, const ValidTokens& valid = {});

// Inputs: logits; or logits, mask, count. Output: loss [1].
extern const OpSpec kRouterZLoss;

// dz_ti = d_loss * (2 c / T) * lse_t * softmax(z_t)_i, with lse_t = log sum_e exp(z_te); the count
// instead of T, and 0 for padding, where there is a mask.
// Inputs: those of the loss, d_loss [1]. Output: d_logits [T, E].
extern const OpSpec kRouterZLossGradient;

}  // namespace troupe
