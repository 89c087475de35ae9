// Linear map with one weight per expert: the products of an MoE layer.
//
//   y[r, n] = sum over k of x[r, k] * W[e, n, k]     for offsets[e] <= r < offsets[e + 1]
//
// with x [R, K] and W [E, N, K] of the compute dtype and offsets i32 [E + 1], ascending from 0 to
// the number of live rows. x is usually ragged; y [R, N] has its dtype and row count. An expert may
// have no rows. Sums are kept in the accumulation type and rounded once. Rows at and beyond
// offsets[E] are neither read nor written.
//
// The weights may be in two tensors, those of the last experts in a second one, V [C, N, K]: W is
// [E - C, N, K] then (copies of other ranks' experts, exchange/clone_experts).
//
// Kinds
//   grouped_linear                 (x, W, offsets, V optional)       -> y [R, N]
//   grouped_linear_data_gradient   (dy, W, offsets, V optional)      -> dx [R, K], dy_r W_e
//   grouped_linear_weight_gradient (dy, x, offsets, target optional) -> dW [F, N, K] (+)= dy_e^T
//   x_e, of F experts from `first` on
// The last has the accumulation dtype, or writes to or adds into `target`, whose dtype is that or
// the weight's: declare_weight_gradient in program/derivative.h. The gradient of an expert without
// rows is exactly zero: it is stored as such, or the target is left alone when accumulating.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct GroupedLinearWeightGradientAttributes {
  bool accumulate = false;
  int32_t first = 0;
  int32_t experts = 0;  // F; 0: all
};

// Emits the map of `x` [R, K] by `weight` [E, N, K] and returns y [R, N]. `more`: the weights of
// the last experts, or invalid.
ValueId grouped_linear(Builder& builder, ValueId x, ValueId weight, ValueId offsets,
                       const std::string& name, ValueId more = {});

extern const OpSpec kGroupedLinear;
extern const OpSpec kGroupedLinearDataGradient;
extern const OpSpec kGroupedLinearWeightGradient;

}  // namespace troupe
