// Router entropy, a metric: how undecided the router is,
//   H = mean over tokens t of -sum_e q_te ln q_te,   q_t = softmax(z_t) over all E experts,
// in nats: 0 when every token is sure of one expert, ln E when all experts are alike. An expert
// with q = 0 adds nothing. There is no derivative: H does not influence the loss. With ValidTokens
// it is the sum over the tokens here that count, divided by the count of all ranks (at least 1).
#pragma once

#include <string>

#include "ops/losses/router_loss/router_loss.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// `logits`: [T, E], f32 or f64. Returns the entropy, [1] of the logits' dtype.
ValueId router_entropy(Builder& builder, ValueId logits, const std::string& name,
                       const ValidTokens& valid = {});

// Inputs: logits; or logits, mask, count. Output: entropy [1]. No attributes.
extern const OpSpec kRouterEntropy;

}  // namespace troupe
