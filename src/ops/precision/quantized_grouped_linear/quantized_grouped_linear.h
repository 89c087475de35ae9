// The products of ops/experts/grouped_linear with operands in 8 bits
// (ops/precision/quantized_product.h).
//
// Kinds
//   quantized_grouped_linear                 (x, W, their scales, offsets)  -> y [R, N]
//   quantized_grouped_linear_data_gradient   (dy, W, their scales, offsets) -> dx [R, K]
//   quantized_grouped_linear_weight_gradient (dy, x, their scales, offsets, target optional)
//                                                                           -> dW [E, N, K]
// with codes x [R, K], W [E, N, K], dy [R, N], and results of the compute dtype; the last as of
// grouped_linear_weight_gradient. Rows of an expert share no scale with those of another. Passes
// make them of those products; they have no derivative. Kernels on GPUs:
// ops/precision/quantized_kernels.h.
#pragma once

#include "program/op_spec.h"

namespace troupe {

inline constexpr int kQuantizedOffsets = 4;  // which input has the offsets

extern const OpSpec kQuantizedGroupedLinear;
extern const OpSpec kQuantizedGroupedLinearDataGradient;
extern const OpSpec kQuantizedGroupedLinearWeightGradient;

}  // namespace troupe
