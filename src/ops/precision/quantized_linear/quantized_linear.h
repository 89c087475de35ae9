// The products of ops/products/linear with operands in 8 bits (ops/precision/quantized_product.h).
//
// Kinds
//   quantized_linear                 (x, W, their scales, b optional)       -> y [T, N]
//   quantized_linear_data_gradient   (dy, W, their scales)                  -> dx [T, K]
//   quantized_linear_weight_gradient (dy, x, their scales, target optional) -> dW [N, K]
// with codes x [T, K], W [N, K], dy [T, N], and results and b of the compute dtype; the last as of
// linear_weight_gradient. Passes make them of those products; they have no derivative. Kernels
// on GPUs: ops/precision/quantized_kernels.h.
#pragma once

#include "program/op_spec.h"

namespace troupe {

extern const OpSpec kQuantizedLinear;
extern const OpSpec kQuantizedLinearDataGradient;
extern const OpSpec kQuantizedLinearWeightGradient;

}  // namespace troupe
