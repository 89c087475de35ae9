// Bias of the experts, added to rows sorted by expert:
//
//   y[r, n] = x[r, n] + p[r] b[e, n]     for offsets[e] <= r < offsets[e + 1]
//
// with x [R, N] and b [E, N] of the compute dtype and offsets i32 [E + 1], ascending from 0 to the
// number of live rows. p[r] is 1, as after the first product of an expert; or, given probabilities,
// probabilities[row_slot[r]] in flat order (slot t * k + s is token t's s-th choice), as after the
// second, where the router's weight multiplies the bias like the rest of the output. With
// probabilities, a row whose row_slot is -1, or anything else outside them, is a filler and has
// p = 0. Computed in the accumulation type and rounded once. x is usually ragged. Rows at and
// beyond offsets[E] are neither read nor written. The biases may be in two tensors, as the weights
// of grouped_linear: those of the last experts in c [C, N], and b is [E - C, N] then.
//
// Kinds
//   grouped_bias (x, b, offsets, probabilities [T, k] in the accumulation dtype optional,
//                 row_slot i32 [R] with probabilities, c optional)  -> y [R, N] like x, which may
//                 be stored over x
//   grouped_bias_weight_gradient (dy, offsets, probabilities, row_slot, target optional)
//                 -> db [F, N] (+)= sum over the expert's rows of p[r] dy[r], of F experts from
//                 `first` on, in the accumulation dtype; or writes to or adds into `target`, whose
//                 dtype is that or the bias's: declare_weight_gradient in program/derivative.h. The
//                 gradient of an expert without rows is exactly zero, or the target is left alone
//                 when accumulating
//   grouped_bias_probability_gradient (dy, b, offsets, probabilities, row_slot, c optional)
//                 -> d_probabilities [T, k], sum over n of b[e, n] dy[r, n] for the row of a slot,
//                 0 for slots without a row
// The gradient of x is the gradient of y itself: nothing is emitted for it. Each live row that is
// no filler has a slot of its own.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct GroupedBiasWeightGradientAttributes {
  bool accumulate = false;
  int32_t first = 0;
  int32_t experts = 0;  // F; 0: all
};

// The router's probabilities, both valid or both absent; and the biases of the last experts.
struct GroupedBiasOptions {
  ValueId probabilities = {};
  ValueId row_slot = {};
  ValueId more = {};
};

// Emits the addition of `bias` [E, N] to the rows of `x` [R, N] and returns y [R, N].
ValueId grouped_bias(Builder& builder, ValueId x, ValueId bias, ValueId offsets,
                     const GroupedBiasOptions& options, const std::string& name);

extern const OpSpec kGroupedBias;
extern const OpSpec kGroupedBiasWeightGradient;
extern const OpSpec kGroupedBiasProbabilityGradient;

}  // namespace troupe
