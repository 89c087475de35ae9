// Root-mean-square norm of the queries and keys of a fused projection ("QK norm"), followed by
// their rotation by position (ops/attention/rope/rope.h), in one pass over memory.
//
// A row holds H query heads, then G key heads, then G value heads, each of d elements. Its vectors
// are, by `scope`,
//   head        every query head, with gain gamma_q [d] for all of them, and every key head, with
//               gamma_k [d] (Qwen3): N = H + G vectors
//   projection  all query heads together, with gamma_q [H d], and all key heads together, with
//               gamma_k [G d] (OLMoE): N = 2 vectors
// and each of them becomes
//   rstd = 1 / sqrt(mean over the vector of x^2 + epsilon)
//   n    = x rstd gamma            or, zero-centred, x rstd (1 + gamma)
// and then each of its heads, with row t at position p = t mod sequence and r = rotary_dim, i <
// r/2,
//   y[i]         = n[i] cos - n[i + r / 2] sin        (cos, sin) = table[p, i]
//   y[i + r / 2] = n[i + r / 2] cos + n[i] sin
//   y[i]         = n[i] from r on
// Statistics and gains have the accumulation type (ops/norms/rms_norm/rms_row.h says why), and only
// y is rounded. Value heads are copied. Gradients turn dy back and go on from there: n and its
// gradient are never in memory.
//
// A projection whose heads are cut among `ranks` ranks is normalised as a whole: `squares` [T, 2]
// then holds, of all ranks' heads, the sum of x^2 over the queries and over the keys, and has a
// gradient of its own, as qk_squares has that makes one rank's part of the sums:
//   s = sum over all ranks of x^2,   rstd = 1 / sqrt(s / (ranks n) + epsilon)
// with n elements of this rank in the vector.
//
// Kinds (T rows, w = (H + 2 G) d; qkv may be ragged, everything with T rows then is)
//   qk_norm_rope (qkv [T, w], gamma_q, gamma_k, table, squares?) -> y [T, w], which may be stored
//       over qkv, rstd [T, N] in the accumulation dtype
//   qk_norm_rope_gradient (dy, qkv, gamma_q, gamma_k, table, rstd, squares?) -> d_qkv [T, w], which
//       may be stored over dy, and with squares d_squares [T, 2]; d_qkv is then that of constant
//       squares
//   qk_squares (qkv [T, w]) -> [T, 2] in the accumulation dtype
//   qk_squares_gradient (d_squares [T, 2], qkv) -> d_qkv [T, w]
//   qk_norm_rope_weight_gradient (dy, qkv, table, rstd, target optional) -> d_gamma (+)= sum of
//       d_n x rstd over the rows and over the vectors in heads [first_head, first_head +
//       head_count): one operation for gamma_q (all query heads), one for gamma_k (all key heads);
//       accumulation dtype, `target` as in declare_weight_gradient. Rows are summed in fixed
//       pieces. Rows beyond the live count do not enter.
// The table has the accumulation dtype and no gradient.
#pragma once

#include <string>
#include <string_view>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

enum class QkNormScope : uint8_t { head, projection };
std::string_view name_of(QkNormScope scope);

struct QkNormAttributes {
  int32_t heads = 0;   // H
  int32_t groups = 0;  // G
  int32_t head_dim = 0;
  double epsilon = 1e-6;
  QkNormScope scope = QkNormScope::head;
  bool zero_centered = false;
  int32_t ranks = 1;       // whose heads `squares` sums up
  int32_t rotary_dim = 0;  // even, at most head_dim
  int32_t sequence = 0;    // positions repeat after this many rows
};

struct QkNormWeightGradientAttributes {
  int32_t heads = 0;
  int32_t groups = 0;
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;
  int32_t sequence = 0;
  int32_t first_head = 0;
  int32_t head_count = 0;
  QkNormScope scope = QkNormScope::head;
  bool accumulate = false;
};

struct QkNormInputs {
  ValueId qkv;
  ValueId gamma_q;
  ValueId gamma_k;
  ValueId table;         // rope_table()
  ValueId squares = {};  // with the scope projection; invalid: those of qkv
};

// Emits norm and rotation of the queries and keys of qkv; returns the new rows.
ValueId qk_norm_rope(Builder& builder, const QkNormInputs& inputs,
                     const QkNormAttributes& attributes, const std::string& name);

// Emits the sums of squares of the queries and of the keys of `qkv`: [T, 2].
ValueId qk_squares(Builder& builder, ValueId qkv, const QkNormAttributes& attributes,
                   const std::string& name);

extern const OpSpec kQkNormRope;
extern const OpSpec kQkNormRopeGradient;
extern const OpSpec kQkNormRopeWeightGradient;
extern const OpSpec kQkSquares;
extern const OpSpec kQkSquaresGradient;

}  // namespace troupe
