// Router z-loss (ST-MoE): keeps the router's logits small,
//   L = c * mean over tokens t of (log sum_e exp(z_te))^2.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct RouterZLossAttributes {
  double coefficient = 0;
};

// `logits`: [T, E], f32 or f64. Returns the loss, [1] of the logits' dtype.
ValueId router_z_loss(Builder& builder, ValueId logits, const RouterZLossAttributes& attributes,
                      const std::string& name);

// Inputs: logits. Output: loss [1].
extern const OpSpec kRouterZLoss;

// dz_ti = d_loss * (2 c / T) * lse_t * softmax(z_t)_i, with lse_t = log sum_e exp(z_te).
// Inputs: logits, d_loss [1]. Output: d_logits [T, E].
extern const OpSpec kRouterZLossGradient;

}  // namespace troupe
