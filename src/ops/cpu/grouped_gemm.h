// Matrix products with one weight per group of rows, for CPU kernels: tiles of ops/cpu/gemm.h.
//
// `offsets` [groups + 1] ascends; rows offsets[e] to offsets[e + 1] are those of group e, which may
// have none. Rows before the first and beyond the last are neither read nor written. The bits of a
// result do not depend on the number of threads. Any thread may call what is here, each with its
// own arguments.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cpu/gemm.h"
#include "program/kernel.h"

namespace troupe {

// Tiles of a product of `rows` rows (over all groups) into `outputs` columns: each group's rows are
// cut into tiles of at most tile_m, the columns as grid_n says.
GemmTiles grouped_tiles(int64_t rows, int64_t outputs, int64_t reduction);

// Tiles of one group's weight gradient, for dy [R, N], x [R, K] and E groups.
GemmTiles grouped_weight_gradient_tiles(const Shape& dy, const Shape& x, int64_t groups);

// What multiply_grouped_rows needs of the workspace: the running number of row tiles.
constexpr uint64_t grouped_rows_bytes(int64_t groups) {
  return static_cast<uint64_t>(groups + 1) * sizeof(int64_t);
}

// Rows of x [R, inputs] times the groups' weights [E, N, K]: out[r, j] = sum over i of
// x[r, i] * op(W_e)[i, j], op(W) = W or its transpose. Uses the scratch of the tiles and the
// beginning of the workspace.
template <class T, class Out>
void multiply_grouped_rows(const KernelArguments& args, const GemmTiles& tiles, const T* x,
                           int64_t inputs, const T* weights, const Shape& weight, bool transposed,
                           const int32_t* offsets, Out* out, int64_t outputs) {
  const int64_t groups = weight[0];
  int64_t* first_tile = reinterpret_cast<int64_t*>(args.workspace);
  first_tile[0] = 0;
  for (int64_t e = 0; e < groups; ++e) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    first_tile[e + 1] = first_tile[e] + (rows + tiles.tile_m - 1) / tiles.tile_m;
  }

  args.pool->parallel_for(first_tile[groups] * tiles.grid_n, [&](int64_t piece, int worker) {
    const int64_t tile = piece / tiles.grid_n;
    const int64_t j = piece % tiles.grid_n * tiles.tile_n;
    const int64_t e = std::upper_bound(first_tile, first_tile + groups + 1, tile) - first_tile - 1;
    const int64_t begin = offsets[e] + (tile - first_tile[e]) * tiles.tile_m;
    const int64_t rows = std::min<int64_t>(tiles.tile_m, offsets[e + 1] - begin);
    const GemmOperand<T> left{x + begin * inputs, inputs, false};
    const GemmOperand<T> right{weights + e * weight.row_elements(), weight[2], transposed};
    gemm_block<T, T, Out>(left, right.block(0, j), rows, std::min(tiles.tile_n, outputs - j),
                          inputs, out + begin * outputs + j, outputs, false, nullptr,
                          args.thread_scratch<accumulation_t<T>>(worker));
  });
}

// out[e] [N, K] (+)= dy_e^T x_e, of `groups` groups. Uses the scratch of the tiles.
template <class T, class Out>
void multiply_groups(const KernelArguments& args, const T* dy, const Shape& dy_shape, const T* x,
                     const Shape& x_shape, const int32_t* offsets, int64_t groups, bool accumulate,
                     Out* out) {
  const GemmTiles tiles = grouped_weight_gradient_tiles(dy_shape, x_shape, groups);
  const int64_t outputs = dy_shape[1];
  const int64_t inputs = x_shape[1];
  args.pool->parallel_for(groups * tiles.tiles(), [&](int64_t piece, int worker) {
    const int64_t e = piece / tiles.tiles();
    const int64_t tile = piece % tiles.tiles();
    const int64_t n = tile / tiles.grid_n * tiles.tile_m;
    const int64_t k = tile % tiles.grid_n * tiles.tile_n;
    const int64_t rows = offsets[e + 1] - offsets[e];
    if (rows == 0 && accumulate) return;
    const GemmOperand<T> left{dy + offsets[e] * outputs, outputs, true};
    const GemmOperand<T> right{x + offsets[e] * inputs, inputs, false};
    gemm_block<T, T, Out>(left.block(n, 0), right.block(0, k), std::min(tiles.tile_m, outputs - n),
                          std::min(tiles.tile_n, inputs - k), rows,
                          out + (e * outputs + n) * inputs + k, inputs, accumulate, nullptr,
                          args.thread_scratch<accumulation_t<T>>(worker));
  });
}

}  // namespace troupe
