#include "ops/experts/grouped_linear/grouped_product_sm90.cuh"
#include "ops/precision/cuda/transpose_codes.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kTransposeTile = kCodePadding;  // rows and columns
constexpr int kTransposeThreads = 256;
constexpr int kChunk = 16;                        // bytes that are moved at once
constexpr int kChunks = kTransposeTile / kChunk;  // of a row of a tile
constexpr int kPitch = kTransposeTile + kChunk;   // of rows in shared memory
constexpr int kMoves = kTransposeTile * kChunks / kTransposeThreads;  // of each thread

// A tile of the input, and where it goes.
struct TransposedTile {
  const uint8_t* from;  // its first code
  int rows = 0;         // that are there; not positive: there is no tile
  int stored = 0;  // columns of the result that are written: the rows, or with zeros after them
  uint8_t* to;     // the first code of its first column
};

// Rows of 4 codes become columns.
__device__ __forceinline__ void transpose_words(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t low_after = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t high_after = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low, low_after, 0x5410);
  columns[1] = __byte_perm(low, low_after, 0x7632);
  columns[2] = __byte_perm(high, high_after, 0x5410);
  columns[3] = __byte_perm(high, high_after, 0x7632);
}

// By a block. `columns` of the tile are there; results have rows of `stride` codes.
__device__ __forceinline__ void transpose_tile(const TransposedTile& tile, int columns,
                                               int64_t row_stride, int64_t stride) {
  __shared__ __align__(16) uint8_t rows_of_tile[kTransposeTile * kPitch];
  __shared__ __align__(16) uint8_t columns_of_tile[kTransposeTile * kTransposeTile];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kMoves; ++i) {
    const int row = (thread + i * kTransposeThreads) / kChunks;
    const int chunk = thread % kChunks;
    int4 codes = make_int4(0, 0, 0, 0);
    if (row < tile.rows && chunk * kChunk < columns) {
      codes = *reinterpret_cast<const int4*>(tile.from + row * row_stride + chunk * kChunk);
    }
    *reinterpret_cast<int4*>(rows_of_tile + row * kPitch + chunk * kChunk) = codes;
  }
  __syncthreads();
  // Each thread: four columns of 16 rows. Chunks lie swizzled, so that lanes meet no bank twice.
  const int quad = thread % 32;
  const int chunk = thread / 32;
  uint32_t result[4][4];
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    uint32_t words[4];
    uint32_t turned[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = chunk * kChunk + part * 4 + i;
      words[i] = *reinterpret_cast<const uint32_t*>(rows_of_tile + row * kPitch + quad * 4);
    }
    transpose_words(words, turned);
#pragma unroll
    for (int i = 0; i < 4; ++i) result[i][part] = turned[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(columns_of_tile + (quad * 4 + i) * kTransposeTile +
                              (chunk ^ quad % kChunks) * kChunk) =
        make_uint4(result[i][0], result[i][1], result[i][2], result[i][3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMoves; ++i) {
    const int column = (thread + i * kTransposeThreads) / kChunks;
    const int at = thread % kChunks;
    if (column >= columns || at * kChunk >= tile.stored) continue;
    *reinterpret_cast<uint4*>(tile.to + column * stride + at * kChunk) =
        *reinterpret_cast<const uint4*>(columns_of_tile + column * kTransposeTile +
                                        (at ^ column / 4 % kChunks) * kChunk);
  }
}

__global__ void __launch_bounds__(kTransposeThreads)
    transpose_matrices_kernel(const uint8_t* codes, int64_t rows, int64_t columns,
                              unsigned row_tiles, uint8_t* out) {
  const int64_t matrix = blockIdx.x / row_tiles;
  const int64_t row = int64_t{blockIdx.x % row_tiles} * kTransposeTile;
  const int64_t column = int64_t{blockIdx.y} * kTransposeTile;
  TransposedTile tile;
  tile.from = codes + (matrix * rows + row) * columns + column;
  tile.rows = static_cast<int>(min(rows - row, int64_t{kTransposeTile}));
  tile.stored = tile.rows;
  tile.to = out + (matrix * columns + column) * rows + row;
  transpose_tile(tile, static_cast<int>(min(columns - column, int64_t{kTransposeTile})), columns,
                 rows);
}

// The last group whose columns begin at `column` or before it.
__device__ __forceinline__ int32_t group_at(const int32_t* offsets, int32_t groups,
                                            int32_t column) {
  int32_t low = 0;
  int32_t high = groups;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (padded_begin(offsets[middle], middle) <= column ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kTransposeThreads)
    transpose_groups_kernel(const uint8_t* codes, const int32_t* offsets, int32_t groups,
                            int64_t columns, int64_t stride, uint8_t* out) {
  const auto first = static_cast<int32_t>(blockIdx.x) * kTransposeTile;
  const int32_t group = group_at(offsets, groups, first);
  const int32_t begin = offsets[group];
  const int32_t row = begin + first - padded_begin(begin, group);
  const int64_t column = int64_t{blockIdx.y} * kTransposeTile;
  TransposedTile tile;
  tile.from = codes + row * columns + column;
  tile.rows = min(offsets[group + 1] - row, kTransposeTile);
  if (tile.rows <= 0) return;
  tile.stored = kTransposeTile;
  tile.to = out + column * stride + first;
  transpose_tile(tile, static_cast<int>(min(columns - column, int64_t{kTransposeTile})), columns,
                 stride);
}

}  // namespace

void transpose_matrices(const CudaKernelArguments& args, const void* codes, int64_t matrices,
                        int64_t rows, int64_t columns, void* out) {
  const int64_t row_tiles = ceil_divide(rows, kTransposeTile);
  launch(args,
         {dim3(static_cast<unsigned>(matrices * row_tiles),
               static_cast<unsigned>(ceil_divide(columns, kTransposeTile))),
          kTransposeThreads},
         transpose_matrices_kernel, static_cast<const uint8_t*>(codes), rows, columns,
         static_cast<unsigned>(row_tiles), static_cast<uint8_t*>(out));
}

void transpose_groups(const CudaKernelArguments& args, const void* codes, const int32_t* offsets,
                      int64_t groups, int64_t rows, int64_t columns, void* out) {
  const int64_t stride = padded_columns(rows, groups);
  launch(args,
         {dim3(static_cast<unsigned>(stride / kTransposeTile),
               static_cast<unsigned>(ceil_divide(columns, kTransposeTile))),
          kTransposeThreads},
         transpose_groups_kernel, static_cast<const uint8_t*>(codes), offsets,
         static_cast<int32_t>(groups), columns, stride, static_cast<uint8_t*>(out));
}

}  // namespace troupe
