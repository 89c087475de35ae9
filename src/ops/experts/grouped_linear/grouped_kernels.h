// The kernels of the products of experts on a GPU, for products of operands in 8 bits that are made
// wide (ops/precision/cuda/widen_codes.h). Only in builds with CUDA.
#pragma once

#include "base/dtype.h"
#include "ops/experts/grouped_linear/grouped_variant.h"
#include "program/cuda_kernel.h"

namespace troupe {

// For operands of one dtype and a result of that, of its accumulation dtype (weight gradients), or
// in bf16. Tiled variants are for operands of bf16 and f16.
CudaKernel grouped_linear_cuda_kernel_of(DType operands, DType out, GroupedVariant variant);
CudaKernel grouped_linear_data_gradient_cuda_kernel_of(DType operands, DType out,
                                                       GroupedVariant variant);
CudaKernel grouped_linear_weight_gradient_cuda_kernel_of(DType operands, DType out,
                                                         GroupedVariant variant);

// The attributes that the last one reads.
Attributes grouped_weight_gradient_attributes(bool accumulate);

}  // namespace troupe
