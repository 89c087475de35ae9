// Linear map of dense rows: y = x W^T + b.
//
//   y[t, n] = sum over k of x[t, k] * W[n, k]  (+ b[n])
//
// with x [T, K], W [N, K] and b [N] of the compute dtype, as in a Hugging Face checkpoint (the
// weight's rows are the outputs). Sums are kept in the accumulation type and rounded once. y has
// x's dtype, or its accumulation dtype when `accumulation_output` is set (router logits); the
// gradient of y then has the accumulation dtype too. No tensor of this room is ragged.
//
// Kinds
//   linear                 (x, W, b optional)       -> y [T, N]
//   linear_data_gradient   (dy, W)                  -> dx [T, K] = dy W, in W's dtype
//   linear_weight_gradient (dy, x, target optional) -> dW [N, K] (+)= dy^T x
//   linear_bias_gradient   (dy, target optional)    -> db [N] (+)= sum over t of dy[t]
// The last two have the accumulation dtype and write to or add into `target`, see
// declare_weight_gradient in program/derivative.h. Gradients of small weights are summed in several
// pieces of rows, fixed by the shapes, that are added in order.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct LinearAttributes {
  bool accumulation_output = false;
};

struct LinearWeightGradientAttributes {
  bool accumulate = false;
};

struct LinearBiasGradientAttributes {
  bool accumulate = false;
};

struct LinearOptions {
  ValueId bias;  // invalid: none
  bool accumulation_output = false;
};

// Emits the map of `x` [T, K] by `weight` [N, K] and returns y [T, N].
ValueId linear(Builder& builder, ValueId x, ValueId weight, const LinearOptions& options,
               const std::string& name);

extern const OpSpec kLinear;
extern const OpSpec kLinearDataGradient;
extern const OpSpec kLinearWeightGradient;
extern const OpSpec kLinearBiasGradient;

}  // namespace troupe
