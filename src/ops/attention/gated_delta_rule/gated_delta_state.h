// The state that a gated delta rule (gated_delta_rule.h) has after a sequence, whatever it was
// before: the rule is linear in it. For each value head
//
//   S after the sequence = P S before it + Q
//
// with Q the state from zeros, and P the product of I - beta_t k'_t k'_t^T times e^{g_t} over the
// rows, the later ones to the left. Columns do not depend on one another, so both come of one
// recurrence with d_v + d_k columns, whose values beyond d_v are zero, from the state [0 | I]. With
// `starts`, P is zero where a document begins in the sequence.
//
// Ranks that have a piece of a sequence each thus find the states before their pieces without
// waiting for one another (ops/attention/fold_delta_states). In the accumulation type; the gradient
// is that of gated_delta_rule without outputs, from what reaches the last state.
//
// Kinds (operands as of gated_delta_rule)
//   gated_delta_state (qkv, gates, starts optional) -> ends [B, H_v, d_k, d_v + d_k], Q beside P,
//       in the accumulation dtype
//   gated_delta_state_gradient (d_ends, qkv, gates, starts) -> d_qkv, zero for queries, and d_gates
#pragma once

#include <string>

#include "ops/attention/gated_delta_rule/delta_attributes.h"
#include "program/builder.h"

namespace troupe {

ValueId gated_delta_state(Builder& builder, ValueId qkv, ValueId gates, ValueId starts,
                          const GatedDeltaRuleAttributes& attributes, const std::string& name);

extern const OpSpec kGatedDeltaState;
extern const OpSpec kGatedDeltaStateGradient;

}  // namespace troupe
