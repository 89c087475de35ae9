// Which CUDA kernel a product of operands in 8 bits gets (program/kernel_choice.h).
//
//   sm90 codes, sm90 codes pair   tensor cores multiply the codes (ops/precision/cuda/
//                                 codes_product.h): bf16 results, one scale for each operand, rows
//                                 of a multiple of 16 codes, on Hopper
//   widened                       what the codes stand for is multiplied, in bf16 where scales are
//                                 powers of two, otherwise in f32 or f64 (cuda/widen_codes.h)
//
// Pure functions; any thread.
#pragma once

#include "ops/experts/grouped_linear/grouped_variant.h"
#include "ops/precision/cuda/codes_product.h"
#include "ops/precision/quantized_product.h"
#include "program/kernel_choice.h"

namespace troupe {

// The dtype of the numbers that `widened` multiplies.
DType widened_dtype(const QuantizedProductAttributes& attributes);

// `widened`: the function for that variant, by the kernel of wide operands that it calls; nullptr
// without CUDA.
KernelChoice choose_quantized_product(const OpView& op, const DeviceTraits& device,
                                      GroupedProduct product, bool grouped,
                                      CudaKernel (*widened)(GroupedVariant));

}  // namespace troupe
