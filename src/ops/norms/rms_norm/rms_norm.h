// Root-mean-square layer normalisation (Zhang and Sennrich, 2019), optionally of a sum.
//
//   s    = x + delta (s = x without delta)
//   rstd = 1 / sqrt(mean over the row of s^2 + epsilon)
//   y    = s rstd gamma            or, zero-centred, s rstd (1 + gamma)
//
// All arithmetic is in the accumulation type, which gamma has too (rms_row.h says why), and y is
// rounded once. s is rounded only where it is stored, for the gradients and for the next sum.
//
// Kinds (T tokens, h = hidden size; x may be ragged, everything with T rows then is)
//   rms_norm (x [T, h], gamma [h], delta [T, h] optional)
//       -> y [T, h], rstd [T] in the accumulation dtype, and with delta: s [T, h]
//   rms_norm_gradient (dy, s, gamma, rstd, d_s [T, h] optional) -> dx [T, h]
//       the gradient of both x and delta: d_s plus the norm's own; may be stored over d_s.
//   rms_norm_weight_gradient (dy, s, rstd, target optional) -> d_gamma [h] (+)= sum over rows of
//       dy s rstd, in the accumulation dtype; `target` as in declare_weight_gradient. Rows are
//       summed in fixed pieces. Rows beyond the live count do not enter.
// When only s has a gradient, it is the gradient of x and delta as it is.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct RmsNormAttributes {
  double epsilon = 1e-5;
  bool zero_centered = false;
};

struct RmsNormWeightGradientAttributes {
  bool accumulate = false;
};

struct RmsNormResult {
  ValueId normalized;
  ValueId sum;  // s: x itself without delta
};

// Emits the norm of x [T, h] with gain gamma [h].
RmsNormResult rms_norm(Builder& builder, ValueId x, ValueId gamma,
                       const RmsNormAttributes& attributes, const std::string& name);

// Emits the norm of x + delta, and the sum.
RmsNormResult add_rms_norm(Builder& builder, ValueId x, ValueId delta, ValueId gamma,
                           const RmsNormAttributes& attributes, const std::string& name);

extern const OpSpec kRmsNorm;
extern const OpSpec kRmsNormGradient;
extern const OpSpec kRmsNormWeightGradient;

}  // namespace troupe
