// The CPU kernels of this room, and the tiles that shape both their work and their memory.
#pragma once

#include "ops/cpu/gemm.h"
#include "program/kernel.h"
#include "program/op_spec.h"

namespace troupe {

CpuKernel grouped_linear_cpu_kernel(const OpView& op);
CpuKernel grouped_linear_data_gradient_cpu_kernel(const OpView& op);
CpuKernel grouped_linear_weight_gradient_cpu_kernel(const OpView& op);

// Tiles of a product of `rows` rows (over all experts) into `outputs` columns: each expert's rows
// are cut into tiles of at most tile_m, the columns as grid_n says.
GemmTiles grouped_linear_tiles(int64_t rows, int64_t outputs, int64_t reduction);

// Tiles of one expert's weight gradient, for dy [R, N], x [R, K] and E experts.
GemmTiles grouped_linear_weight_gradient_tiles(const Shape& dy, const Shape& x, int64_t experts);

}  // namespace troupe
