// Into how many pieces CUDA kernels cut sums over rows (ops/cuda/row_sums.cuh), and what the pieces
// take. The same numbers for every GPU: the pieces decide the order of the sums.
//
// Pure functions; any thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/dtype.h"

namespace troupe {

// Blocks that a GPU of 132 multiprocessors works on at once, at the registers that the terms take.
inline constexpr int64_t kSumBlocks = 528;

// Pieces for n sums over `rows` rows: that many blocks, but few enough that adding them does
// not take long.
inline int64_t row_sum_pieces(int64_t rows, int64_t n) {
  const int64_t blocks = (n + 255) / 256;
  const int64_t wanted = (kSumBlocks + blocks - 1) / blocks;
  return std::clamp<int64_t>(std::min(wanted, (rows + 15) / 16), 1, kSumBlocks / 2);
}

// Scratch memory of the pieces of n sums over `rows` rows of a dtype.
inline uint64_t row_sums_bytes(DType rows_dtype, int64_t rows, int64_t n) {
  return static_cast<uint64_t>(row_sum_pieces(rows, n) * n) *
         size_of(accumulation_dtype(rows_dtype));
}

}  // namespace troupe
