// Products of operands in 8 bits by kernels of wide operands: what a code stands for, code * scale,
// is written to scratch memory first. In bf16, which is exact where scales are powers of two, in
// f32 or f64. For recipes and shapes that tensor cores do not multiply as they are: correct, and no
// faster than wide operands. Any thread; only run_widened needs a GPU.
#pragma once

#include <cstdint>

#include "ops/precision/quantized_product.h"
#include "ops/product_scratch.h"
#include "program/cuda_kernel.h"

namespace troupe {

struct WidenedProduct {
  CudaKernel kernel = nullptr;             // of operands of dtype `wide`
  const Attributes* attributes = nullptr;  // for it
  DType wide = DType::f32;
  uint64_t own_scratch = 0;  // bytes that it needs itself
  // Inputs that it gets after the operands; -1: none.
  int offsets = -1;  // the experts' first rows
  int bias = -1;     // of the compute dtype, which is widened as well
};

void run_widened(const CudaKernelArguments& args, const WidenedProduct& product);

// Scratch memory is booked in multiples of 256 bytes: first the kernel's own, then both operands,
// then a bias in f32.
constexpr uint64_t widened_bytes(int64_t elements, size_t size) {
  return align_scratch(static_cast<uint64_t>(elements) * size);
}

}  // namespace troupe
