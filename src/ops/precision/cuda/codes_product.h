// Products of operands in 8 bits on Hopper's tensor cores, dense and of experts: the recipes
// `tensorwise`, with one scale for each operand (of experts: for each one's weight, and each one's
// rows), and `blockwise`, with scales of 128 numbers along the sum. By grouped_product_sm90.cuh.
// Any thread.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "ops/experts/grouped_linear/grouped_variant.h"
#include "program/cuda_kernel.h"

namespace troupe {

// Which kernel of an operation of quantized_linear, or quantized_grouped_linear (`grouped`).
struct CodesKernel {
  GroupedProduct product = GroupedProduct::forward;
  DType left = DType::f8e4m3;  // of the codes; the other operand's are f8e4m3
  DType out = DType::bf16;     // bf16, or f32 for weight gradients
  bool grouped = false;
  bool pair = false;    // pairs of blocks that share tiles
  bool blocks = false;  // scales of blocks; only of f8e4m3
};

// Only in builds with CUDA.
CudaKernel codes_product_kernel(const CodesKernel& kernel);

// Scratch memory: the offsets of dense products, which are of one group.
inline constexpr uint64_t kCodesScratchBytes = 256;

}  // namespace troupe
