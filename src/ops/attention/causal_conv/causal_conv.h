// Depthwise causal convolution over time with SiLU, as before a gated delta rule (Yang et al.,
// "Gated Delta Networks", 2024; Qwen3-Next).
//
// Rows are batch-major: row b S + s is position s of sequence b. Each column c has K taps of its
// own, the last of which belongs to the row itself:
//
//   p[t, c] = sum over j < K of w[c, j] x[t - K + 1 + j, c]     y[t, c] = silu(p[t, c])
//
// Taps before the sequence, and with `starts` before the document of the row, count as zero. With
// `before` the rows before the sequence are there: of each sequence the last K - 1 of them. All in
// the accumulation type, rounded once; p is not kept, the gradients compute it again:
//
//   dp[t, c] = dy[t, c] silu'(p[t, c])
//   dx[t, c] = sum over j of w[c, j] dp[t + K - 1 - j, c]
//   dw[c, j] = sum over t of dp[t, c] x[t - K + 1 + j, c]
//
// Kinds (T = B S rows, not ragged; w has the accumulation dtype; starts is i32 [T]: the position in
// its sequence at which the document of each row begins, negative where that is before the
// sequence; before is [B (K - 1), C], K > 1, of the dtype of x)
//   causal_conv          (x [T, C], w [C, K], starts optional, before optional)  -> y [T, C]
//   causal_conv_gradient (dy, x, w, starts optional, before optional)            -> dx [T, C], and
//       d_before where there is one
//   causal_conv_weight_gradient (dy, x, w, starts optional, before optional, target optional)
//       -> dw [C, K]; `target` as in declare_weight_gradient. Rows are summed in a fixed order.
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

// Where documents begin, and the rows before each sequence.
struct ConvBeginnings {
  ValueId starts = {};
  ValueId before = {};
};

// Emits the convolution of x [T, C] with w [C, K], K <= kMostTaps, C and K as w says.
ValueId causal_conv(Builder& builder, ValueId x, ValueId w, const ConvBeginnings& beginnings,
                    const CausalConvAttributes& attributes, const std::string& name);

// How many rows before row `row`, which is at `position` of its sequence, count for it at most,
// with `earlier` rows before the sequence.
inline constexpr int64_t rows_seen(int64_t row, int64_t position, int64_t earlier,
                                   const int32_t* starts) {
  const int64_t all = position + earlier;
  if (starts == nullptr) return all;
  const int64_t own = position - starts[row];
  return own < all ? own : all;
}

extern const OpSpec kCausalConv;
extern const OpSpec kCausalConvGradient;
extern const OpSpec kCausalConvWeightGradient;

}  // namespace troupe
