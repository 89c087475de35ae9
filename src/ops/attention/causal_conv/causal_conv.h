// Depthwise causal convolution over time with SiLU, as before a gated delta rule (Yang et al.,
// "Gated Delta Networks", 2024; Qwen3-Next).
//
// Rows are batch-major: row b S + s is position s of sequence b. Each column c has K taps of its
// own, the last of which belongs to the row itself:
//
//   p[t, c] = sum over j < K of w[c, j] x[t - K + 1 + j, c]     y[t, c] = silu(p[t, c])
//
// Taps before the sequence, and with `starts` before the document of the row, count as zero. All in
// the accumulation type, rounded once; p is not kept, the gradients compute it again:
//
//   dp[t, c] = dy[t, c] silu'(p[t, c])
//   dx[t, c] = sum over j of w[c, j] dp[t + K - 1 - j, c]
//   dw[c, j] = sum over t of dp[t, c] x[t - K + 1 + j, c]
//
// Kinds (T = B S rows, not ragged; w has the accumulation dtype; starts is i32 [T]: the position in
// its sequence at which the document of each row begins)
//   causal_conv                 (x [T, C], w [C, K], starts optional)              -> y [T, C]
//   causal_conv_gradient        (dy, x, w, starts optional)                        -> dx [T, C]
//   causal_conv_weight_gradient (dy, x, w, starts optional, target optional)       -> dw [C, K];
//       `target` as in declare_weight_gradient. Rows are summed in a fixed order.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

inline constexpr int32_t kMostTaps = 8;

struct CausalConvAttributes {
  int32_t sequence = 1;     // S
  bool accumulate = false;  // of the weight's gradient
};

// Emits the convolution of x [T, C] with w [C, K], K <= kMostTaps, C and K as w says.
ValueId causal_conv(Builder& builder, ValueId x, ValueId w, ValueId starts,
                    const CausalConvAttributes& attributes, const std::string& name);

// The first row whose elements count for row `row`.
inline constexpr int64_t first_row_seen(int64_t row, int64_t sequence, const int32_t* starts) {
  return row - row % sequence + (starts == nullptr ? 0 : starts[row]);
}

extern const OpSpec kCausalConv;
extern const OpSpec kCausalConvGradient;
extern const OpSpec kCausalConvWeightGradient;

}  // namespace troupe
