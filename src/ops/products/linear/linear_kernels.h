// The kernels of dense products on a GPU, for products of operands in 8 bits that are made wide
// (ops/precision/cuda/widen_codes.h). Only in builds with CUDA.
#pragma once

#include "base/dtype.h"
#include "program/cuda_kernel.h"

namespace troupe {

// For operands of one dtype and a result of that, of its accumulation dtype (weight gradients), or
// in bf16. They need kProductScratchBytes.
CudaKernel linear_cuda_kernel_of(DType operands, DType out);
CudaKernel linear_data_gradient_cuda_kernel_of(DType operands, DType out);
CudaKernel linear_weight_gradient_cuda_kernel_of(DType operands, DType out);

// The attributes that the last one reads; the others read none.
Attributes linear_weight_gradient_attributes(bool accumulate);

}  // namespace troupe
