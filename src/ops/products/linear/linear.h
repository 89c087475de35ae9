// Linear map of dense rows: y = x W^T + b.
//
//   y[t, n] = sum over k of x[t, k] * W[n, k]  (+ b[n])
//
// with x [T, K], W [N, K] and b [N] of the compute dtype, as in a Hugging Face checkpoint (the
// weight's rows are the outputs). `output` is the dtype of y and of its gradient: the compute dtype
// itself, its accumulation dtype, or f64 (router logits need one of the latter). With f64 the
// operands are converted, and products and sums are in f64, in the gradients too; otherwise sums
// are in the accumulation type. Each result is rounded once. No tensor of this room is ragged.
// Where `detached`, x gets no gradient. Results in another dtype than the compute dtype, detached
// products, and those that say so keep their precision where a pass lowers that of products
// (`quantizable`); the attribute changes nothing of what is computed here.
//
// Kinds
//   linear                 (x, W, b optional)       -> y [T, N]
//   linear_data_gradient   (dy, W)                  -> dx [T, K] = dy W, in W's dtype
//   linear_weight_gradient (dy, x, target optional) -> dW [N, K] (+)= dy^T x
//   linear_bias_gradient   (dy, target optional)    -> db [N] (+)= sum over t of dy[t]
// The last two have the weight's accumulation dtype, or write to or add into `target`, whose dtype
// is that or the weight's: declare_weight_gradient in program/derivative.h. Gradients of small
// weights are summed in several pieces of rows, fixed by the shapes, that are added in order.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

enum class LinearOutput : uint8_t { compute, accumulation, f64 };

struct LinearAttributes {
  LinearOutput output = LinearOutput::compute;
  bool detached = false;
  bool quantizable = true;
};

struct LinearDataGradientAttributes {
  bool quantizable = true;
};

struct LinearWeightGradientAttributes {
  bool accumulate = false;
  bool quantizable = true;
};

struct LinearBiasGradientAttributes {
  DType bias_dtype = DType::f32;
  bool accumulate = false;
};

struct LinearOptions {
  ValueId bias = {};  // invalid: none
  LinearOutput output = LinearOutput::compute;
  bool detached = false;  // x gets no gradient
  bool quantizable = true;
};

// Emits the map of `x` [T, K] by `weight` [N, K] and returns y [T, N].
ValueId linear(Builder& builder, ValueId x, ValueId weight, const LinearOptions& options,
               const std::string& name);

// For derivative rules: emits the gradient of input `i`, a bias [N] that was added to each row,
// from dy [T, N], and hands it over.
void add_bias_gradient(DerivativeContext& context, int i, ValueId dy);

extern const OpSpec kLinear;
extern const OpSpec kLinearDataGradient;
extern const OpSpec kLinearWeightGradient;
extern const OpSpec kLinearBiasGradient;

}  // namespace troupe
