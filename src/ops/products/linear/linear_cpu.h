// The CPU kernels of this room, and the tiles that shape both their work and their memory.
#pragma once

#include "ops/cpu/gemm.h"
#include "program/kernel.h"
#include "program/op_spec.h"

namespace troupe {

CpuKernel linear_cpu_kernel(const OpView& op);
CpuKernel linear_data_gradient_cpu_kernel(const OpView& op);
CpuKernel linear_weight_gradient_cpu_kernel(const OpView& op);
CpuKernel linear_bias_gradient_cpu_kernel(const OpView& op);

// Tiles from the shapes of the operands: forward (x, W), data gradient (dy, W) and weight gradient
// (dy, x).
GemmTiles linear_tiles(const Shape& x, const Shape& weight);
GemmTiles linear_data_gradient_tiles(const Shape& dy, const Shape& weight);
GemmTiles linear_weight_gradient_tiles(const Shape& dy, const Shape& x);

// Pieces into which the bias gradient cuts its rows.
int64_t linear_bias_gradient_pieces(const Shape& dy);

}  // namespace troupe
