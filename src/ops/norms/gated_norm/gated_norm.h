// RMS norm of each head times SiLU of a gate, as after a gated delta rule (Qwen3-Next):
//
//   rstd[t, h] = 1 / sqrt(mean over the head of x^2 + epsilon)
//   n = x rstd gamma,   y = n silu(z)
//
// in the accumulation type, which gamma has too, rounded once. Nothing is kept; the gradients
// compute rstd again. With u = dy silu(z):
//
//   dz = dy n silu'(z),   d_gamma = sum over rows and heads of u x rstd
//   dx = rstd (u gamma - x rstd^2 mean over the head of u gamma x)
//
// Kinds (T rows of H heads of d elements, not ragged)
//   gated_norm                 (x [T, H d], z [T, H d], gamma [d])  -> y [T, H d]
//   gated_norm_gradient        (dy, x, z, gamma)                    -> dx, which may be stored over
//                                                                      dy, and dz
//   gated_norm_weight_gradient (dy, x, z, target optional)          -> d_gamma [d] in the
//       accumulation dtype; `target` as in declare_weight_gradient. Rows are summed in fixed
//       pieces.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct GatedNormAttributes {
  int64_t head_dim = 1;  // d
  double epsilon = 1e-6;
  bool accumulate = false;  // of the gain's gradient
};

ValueId gated_norm(Builder& builder, ValueId x, ValueId gate, ValueId gamma,
                   const GatedNormAttributes& attributes, const std::string& name);

extern const OpSpec kGatedNorm;
extern const OpSpec kGatedNormGradient;
extern const OpSpec kGatedNormWeightGradient;

}  // namespace troupe
