// Plain matrix products on the GPU, for whatever cuBLASLt does not multiply: operands of several
// types, groups of rows whose sizes only the GPU knows. Each block computes one tile of the result
// with ordinary arithmetic in the accumulation type, in a fixed order.
#pragma once

#include "program/cuda/device.cuh"

namespace troupe {

inline constexpr int kTile = 64;       // rows and columns of a tile
inline constexpr int kTileDepth = 16;  // of the sums, at a time
inline constexpr int kTileThreads = 256;
inline constexpr int kTileThreadSide = 4;  // of the square of results that a thread has

// op(data)[i, j]: data[i * stride + j], or data[j * stride + i] when transposed.
template <class T>
struct TileOperand {
  const T* data;
  int64_t stride;
  bool transposed;

  __device__ T at(int64_t i, int64_t j) const {
    return transposed ? data[j * stride + i] : data[i * stride + j];
  }
};

// The tile of left [m, k] right [k, n] with rows from `row` on and columns from `column` on; what
// lies outside of the matrices is not read. Then calls put(i, j, sum) for its elements, each once.
// Sum: the type of the sums. All threads of the block take part, kTileThreads of them.
template <class Sum, class L, class R, class Put>
__device__ void multiply_tile(const TileOperand<L>& left, const TileOperand<R>& right, int64_t m,
                              int64_t n, int64_t k, int64_t row, int64_t column, const Put& put) {
  __shared__ Sum left_tile[kTileDepth][kTile + 1];
  __shared__ Sum right_tile[kTileDepth][kTile + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const int x = thread % (kTile / kTileThreadSide);
  const int y = thread / (kTile / kTileThreadSide);
  Sum sums[kTileThreadSide][kTileThreadSide] = {};
  for (int64_t first = 0; first < k; first += kTileDepth) {
    __syncthreads();
    for (int i = thread; i < kTile * kTileDepth; i += kTileThreads) {
      // Neighbouring threads read neighbouring elements.
      const int a = left.transposed ? i % kTile : i / kTileDepth;
      const int b = left.transposed ? i / kTile : i % kTileDepth;
      const bool inside = row + a < m && first + b < k;
      left_tile[b][a] = inside ? static_cast<Sum>(widen(left.at(row + a, first + b))) : Sum(0);
    }
    for (int i = thread; i < kTile * kTileDepth; i += kTileThreads) {
      const int a = right.transposed ? i % kTileDepth : i / kTile;
      const int b = right.transposed ? i / kTileDepth : i % kTile;
      const bool inside = first + a < k && column + b < n;
      right_tile[a][b] = inside ? static_cast<Sum>(widen(right.at(first + a, column + b))) : Sum(0);
    }
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kTileDepth; ++depth) {
      Sum l[kTileThreadSide];
      Sum r[kTileThreadSide];
#pragma unroll
      for (int i = 0; i < kTileThreadSide; ++i) {
        l[i] = left_tile[depth][y * kTileThreadSide + i];
        r[i] = right_tile[depth][x + i * (kTile / kTileThreadSide)];
      }
#pragma unroll
      for (int i = 0; i < kTileThreadSide; ++i) {
#pragma unroll
        for (int j = 0; j < kTileThreadSide; ++j) sums[i][j] += l[i] * r[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTileThreadSide; ++i) {
#pragma unroll
    for (int j = 0; j < kTileThreadSide; ++j) {
      const int64_t at_row = row + y * kTileThreadSide + i;
      const int64_t at_column = column + x + j * (kTile / kTileThreadSide);
      if (at_row < m && at_column < n) put(at_row, at_column, sums[i][j]);
    }
  }
}

// Where a block of a grid over tiles of rows finds its work when the rows are sorted into groups:
// the group, and the tile's first row among all. Tiles do not cross groups. Found by the first warp
// from the offsets, and told to all threads of the block.
struct GroupTile {
  int32_t group;  // -1: there are fewer tiles than blocks
  int32_t first;  // row
  int32_t end;    // of the group's rows
};

__device__ __forceinline__ GroupTile find_group_tile(const int32_t* offsets, int groups,
                                                     int32_t tile, int32_t tile_rows) {
  __shared__ GroupTile found;
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x);
    GroupTile own{-1, 0, 0};
    int32_t before = 0;  // tiles of earlier groups
    for (int first = 0; first < groups; first += 32) {
      const int group = first + lane;
      const int32_t begin = group < groups ? offsets[group] : 0;
      const int32_t end = group < groups ? offsets[group + 1] : 0;
      const int32_t tiles = (end - begin + tile_rows - 1) / tile_rows;
      int32_t through = tiles;
#pragma unroll
      for (int width = 1; width < 32; width *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffU, through, static_cast<unsigned>(width));
        if (lane >= width) through += other;
      }
      const int32_t start = before + through - tiles;
      const bool here = tile >= start && tile < start + tiles;
      if (here) own = {group, begin + (tile - start) * tile_rows, end};
      const uint32_t finder = __ballot_sync(0xffffffffU, here);
      if (finder != 0) {
        if (here) found = own;
        break;
      }
      before += __shfl_sync(0xffffffffU, through, 31);
      if (first + 32 >= groups && lane == 0) found = own;
    }
  }
  __syncthreads();
  return found;
}

// As many tiles as `groups` groups can have that share `rows` rows.
inline int64_t most_group_tiles(int64_t rows, int64_t groups, int64_t tile_rows) {
  return std::min(rows, rows / tile_rows + groups);
}

}  // namespace troupe
