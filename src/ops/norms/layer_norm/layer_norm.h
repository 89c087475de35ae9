// Layer normalisation (Ba, Kiros and Hinton, 2016), optionally of a sum.
//
//   s    = x + delta (s = x without delta)
//   mean = mean over the row of s,  rstd = 1 / sqrt(mean over the row of (s - mean)^2 + epsilon)
//   y    = (s - mean) rstd gamma + beta     or, zero-centred, (s - mean) rstd (1 + gamma) + beta
//
// All arithmetic is in the accumulation type, which gamma and beta have too
// (ops/norms/rms_norm/rms_row.h says why), and y is rounded once; the variance is summed about the
// mean. s is rounded only where it is stored, for the gradients and for the next sum.
//
// Kinds (T tokens, h = hidden size; x may be ragged, everything with T rows then is)
//   layer_norm (x [T, h], gamma [h], beta [h], delta [T, h] optional)
//       -> y [T, h], mean [T] and rstd [T] in the accumulation dtype, and with delta: s [T, h]
//   layer_norm_gradient (dy, s, gamma, mean, rstd, d_s [T, h] optional) -> dx [T, h]
//       the gradient of both x and delta: d_s plus the norm's own; may be stored over d_s.
//   layer_norm_weight_gradient (dy, s, mean, rstd, target optional) -> d_gamma [h] (+)= sum over
//       rows of dy (s - mean) rstd
//   layer_norm_bias_gradient (dy, target optional) -> d_beta [h] (+)= sum over rows of dy
// The last two have the accumulation dtype, with `target` as in declare_weight_gradient; rows are
// summed in fixed pieces, and rows beyond the live count do not enter. When only s has a gradient,
// it is the gradient of x and delta as it is.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct LayerNormAttributes {
  double epsilon = 1e-5;
  bool zero_centered = false;
};

struct LayerNormWeightGradientAttributes {
  bool accumulate = false;
};

struct LayerNormBiasGradientAttributes {
  bool accumulate = false;
};

struct LayerNormResult {
  ValueId normalized;
  ValueId sum;  // s: x itself without delta
};

// Emits the norm of x [T, h] with gain gamma [h] and bias beta [h].
LayerNormResult layer_norm(Builder& builder, ValueId x, ValueId gamma, ValueId beta,
                           const LayerNormAttributes& attributes, const std::string& name);

// Emits the norm of x + delta, and the sum.
LayerNormResult add_layer_norm(Builder& builder, ValueId x, ValueId delta, ValueId gamma,
                               ValueId beta, const LayerNormAttributes& attributes,
                               const std::string& name);

extern const OpSpec kLayerNorm;
extern const OpSpec kLayerNormGradient;
extern const OpSpec kLayerNormWeightGradient;
extern const OpSpec kLayerNormBiasGradient;

}  // namespace troupe
