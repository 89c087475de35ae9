// The tiles of the CPU kernels of this folder, which shape their work and their memory.
#pragma once

#include "ops/cpu/gemm.h"
#include "ops/products/head_linear/head_linear.h"
#include "program/op_spec.h"

namespace troupe {

CpuKernel head_linear_cpu_kernel(const OpView& op);
CpuKernel head_linear_weight_gradient_cpu_kernel(const OpView& op);

// Of one head's product. From the shapes of x and W, and of c.
GemmTiles head_linear_tiles(const HeadLinearAttributes& attributes, const Shape& x,
                            const Shape& weight);
GemmTiles head_linear_weight_gradient_tiles(const HeadLinearWeightGradientAttributes& attributes,
                                            const Shape& columns);

}  // namespace troupe
