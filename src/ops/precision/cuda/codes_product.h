// Products of operands in 8 bits on Hopper's tensor cores, dense and of experts, with one scale for
// each operand (of experts: for each one's weight, and each one's rows): the recipe `tensorwise`.
// By grouped_product_sm90.cuh, for which operands are transposed in scratch memory where a product
// sums over their rows. Any thread.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "ops/precision/cuda/codes_scratch.h"
#include "program/cuda_kernel.h"

namespace troupe {

// The kernel for an operation of quantized_linear, or quantized_grouped_linear (`grouped`), with a
// left operand of dtype `left` and a result of dtype `out`, bf16 but of weight gradients. In pairs
// of blocks that share tiles, or not. Only in builds with CUDA.
CudaKernel codes_product_kernel(CodesProduct product, DType left, DType out, bool grouped,
                                bool pair);

}  // namespace troupe
