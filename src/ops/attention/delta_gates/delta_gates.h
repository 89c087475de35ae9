// The gates of a gated delta rule (Yang et al., "Gated Delta Networks", 2024, section 3;
// Qwen3-Next): how strongly each head writes, and how fast it forgets.
//
//   beta[t, h] = sigma(b[t, h])
//   g[t, h]    = -exp(A_log[h]) softplus(a[t, h] + dt_bias[h])      the logarithm of the decay
//
// with softplus(x) = log(1 + e^x). A row of the projection has for each of H / r groups the b of
// its r heads, then their a. A row of gates has beta of all H heads, then g of all.
//
//   db = d_beta beta (1 - beta)              da = -d_g exp(A_log) sigma(a + dt_bias)
//   dA_log[h] = sum over t of d_g g          d_dt_bias[h] = sum over t of da, unrounded
//
// Kinds (T rows, not ragged; all but x in the accumulation dtype)
//   delta_gates                    (x [T, 2 H], A_log [H], dt_bias [H])           -> gates [T, 2 H]
//   delta_gates_gradient           (d_gates, x, A_log, dt_bias)                   -> dx [T, 2 H]
//   delta_gates_parameter_gradient (d_gates, x, A_log, dt_bias, target optional)  -> [H]: that of
//       A_log or of dt_bias, as the attributes say; `target` as in declare_weight_gradient. Rows
//       are summed in a fixed order.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct DeltaGatesAttributes {
  int32_t heads = 1;        // H
  int32_t group_heads = 1;  // r, a divisor of H

  // The column of b of a head; a lies group_heads columns after it.
  constexpr int64_t column(int64_t head) const {
    return head / group_heads * 2 * group_heads + head % group_heads;
  }
};

struct DeltaGatesParameterGradientAttributes {
  DeltaGatesAttributes gates;
  bool of_bias = false;  // else of A_log
  bool accumulate = false;
};

ValueId delta_gates(Builder& builder, ValueId x, ValueId decay_log, ValueId bias,
                    const DeltaGatesAttributes& attributes, const std::string& name);

extern const OpSpec kDeltaGates;
extern const OpSpec kDeltaGatesGradient;
extern const OpSpec kDeltaGatesParameterGradient;

}  // namespace troupe
