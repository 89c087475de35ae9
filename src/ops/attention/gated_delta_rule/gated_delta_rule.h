// The gated delta rule (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule",
// 2024): attention whose memory is one matrix for each head, which forgets and is corrected.
//
// Rows are batch-major: row b S + s is position s of sequence b. A row of qkv has H_k heads of
// queries and then of keys of d_k elements each, then H_v heads of values of d_v; value head h goes
// with query and key head h / (H_v / H_k). A row of gates has beta of all value heads, then g <= 0.
// With q' = d_k^{-1/2} q / sqrt(|q|^2 + 1e-6) and k' = k / sqrt(|k|^2 + 1e-6), for each head, from
// a state S of d_k x d_v zeros:
//
//   D_t = e^{g_t} S_{t-1}
//   u_t = v_t - D_t^T k'_t
//   S_t = D_t + beta_t k'_t u_t^T
//   o_t = S_t^T q'_t
//
// With `starts` the state is zero before each document. The gradients go backwards, with dS_t all
// that reaches S_t:
//
//   dS_t  = e^{g_{t+1}} (dS_{t+1} - k'_{t+1} dv_{t+1}^T) + q'_t do_t^T
//   dv_t  = beta_t dS_t^T k'_t                   dq'_t = S_t do_t
//   dk'_t = beta_t dS_t u_t - D_t dv_t           d_beta_t = u_t . dS_t^T k'_t
//   dg_t  = sum over all elements of (dS_t - k'_t dv_t^T) D_t
//
// All in the accumulation type. Nothing is kept for the gradients but the inputs: the states are
// computed again from those of every delta_chunk(S)-th row.
//
// Kinds (T = B S rows, not ragged; starts is i32 [T]: the position in its sequence at which the
// document of each row begins)
//   gated_delta_rule (qkv [T, 2 H_k d_k + H_v d_v], gates [T, 2 H_v] in the accumulation dtype,
//       starts optional)                                  -> o [T, H_v d_v]
//   gated_delta_rule_gradient (d_o, qkv, gates, starts)   -> d_qkv, d_gates
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

inline constexpr double kDeltaNormEpsilon = 1e-6;

struct GatedDeltaRuleAttributes {
  int32_t sequence = 1;     // S
  int32_t key_heads = 1;    // H_k
  int32_t value_heads = 1;  // H_v, a multiple of H_k
  int32_t key_dim = 1;      // d_k
  int32_t value_dim = 1;    // d_v

  constexpr int64_t key_size() const { return int64_t{key_heads} * key_dim; }
  constexpr int64_t value_size() const { return int64_t{value_heads} * value_dim; }
  constexpr int64_t row_size() const { return 2 * key_size() + value_size(); }
  constexpr int64_t state_size() const { return int64_t{key_dim} * value_dim; }
  // Where, in a row of qkv, the query, key and value of a value head begin.
  constexpr int64_t query_of(int64_t head) const {
    return head / (value_heads / key_heads) * key_dim;
  }
  constexpr int64_t key_of(int64_t head) const { return key_size() + query_of(head); }
  constexpr int64_t value_of(int64_t head) const { return 2 * key_size() + head * value_dim; }
};

// Rows between states that are kept while a gradient is computed: about the square root of the
// sequence, so that the kept states and those between two of them take the least memory.
constexpr int64_t delta_chunk(int64_t sequence) {
  int64_t chunk = 1;
  while (chunk * chunk < sequence) ++chunk;
  return chunk;
}

// States that one head's gradient holds at a time.
constexpr int64_t delta_states(int64_t sequence) {
  const int64_t chunk = delta_chunk(sequence);
  return (sequence + chunk - 1) / chunk + chunk;
}

ValueId gated_delta_rule(Builder& builder, ValueId qkv, ValueId gates, ValueId starts,
                         const GatedDeltaRuleAttributes& attributes, const std::string& name);

extern const OpSpec kGatedDeltaRule;
extern const OpSpec kGatedDeltaRuleGradient;

}  // namespace troupe
