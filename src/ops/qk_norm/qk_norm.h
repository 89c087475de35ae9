// Root-mean-square norm of every query and key head of a fused projection (semantics of Qwen3 and
// OLMoE-style "QK norm" with one gain vector for all query heads and one for all key heads).
//
// A row holds H query heads, then G key heads, then G value heads, each of d elements. Each query
// head is normalised with gain gamma_q [d] and each key head with gamma_k [d]:
//   rstd = 1 / sqrt(mean over the head of x^2 + epsilon),  y = x rstd gamma
// (statistics in the accumulation type, roundings as in rms_row.h). Value heads are copied.
//
// Kinds (T rows, w = (H + 2 G) d; qkv may be ragged, everything with T rows then is)
//   qk_norm (qkv [T, w], gamma_q [d], gamma_k [d])
//       -> y [T, w], rstd [T, H + G] in the accumulation dtype
//   qk_norm_gradient (dy, qkv, gamma_q, gamma_k, rstd) -> d_qkv [T, w]
//   qk_norm_weight_gradient (dy, qkv, rstd, target optional) -> d_gamma [d] (+)= sum of dy x rstd
//       over the rows and over heads [first_head, first_head + head_count): one operation for
//       gamma_q, one for gamma_k; accumulation dtype, `target` as in declare_weight_gradient. Rows
//       are summed in fixed pieces. Rows beyond the live count do not enter.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct QkNormAttributes {
  int32_t heads = 0;   // H
  int32_t groups = 0;  // G
  int32_t head_dim = 0;
  double epsilon = 1e-6;
};

struct QkNormWeightGradientAttributes {
  int32_t heads = 0;
  int32_t groups = 0;
  int32_t head_dim = 0;
  int32_t first_head = 0;
  int32_t head_count = 0;
  bool accumulate = false;
};

// Emits the norm of the query and key heads of `qkv`; returns the new rows.
ValueId qk_norm(Builder& builder, ValueId qkv, ValueId gamma_q, ValueId gamma_k,
                const QkNormAttributes& attributes, const std::string& name);

extern const OpSpec kQkNorm;
extern const OpSpec kQkNormGradient;
extern const OpSpec kQkNormWeightGradient;

}  // namespace troupe
