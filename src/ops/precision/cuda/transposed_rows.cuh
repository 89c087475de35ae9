// Which rows of a tensor the blocks of its transposed codes have (ops/precision/scale_blocks.h).
//
// Device functions, and sizes of launches.
#pragma once

#include "ops/precision/scale_blocks.h"
#include "program/cuda/device.cuh"

namespace troupe {

// Rows side by side; none in a block that is unused.
struct TransposedRows {
  int64_t first = 0;
  int count = 0;
  int64_t matrix = 0;  // or expert
};

class TransposedGrid {
 public:
  // Of x, or codes in rows like it. Without offsets, rows that are not live count as none.
  TransposedGrid(const Shape& shape, const LiveRows& live, const CudaTensor& offsets)
      : offsets_(static_cast<const int32_t*>(offsets.data)),
        experts_(offsets.data == nullptr ? 0 : static_cast<int32_t>(offsets.shape[0] - 1)),
        live_(live),
        is_one_matrix_(shape.rank() == 2),
        matrix_rows_(is_one_matrix_ ? shape[0] : shape[1]),
        matrix_blocks_(ceil_divide(matrix_rows_, kTransposedRows)),
        columns_(shape.back()),
        blocks_(transposed_shape(shape, experts_)[0]) {}

  int64_t blocks() const { return blocks_; }
  __host__ __device__ int64_t columns() const { return columns_; }

  __device__ TransposedRows rows_of(int64_t block) const {
    if (offsets_ != nullptr) return rows_of_expert(block);
    TransposedRows rows;
    rows.matrix = block / matrix_blocks_;
    const int64_t within = block % matrix_blocks_ * kTransposedRows;
    rows.first = rows.matrix * matrix_rows_ + within;
    const int64_t end = is_one_matrix_ ? live_.count() : matrix_rows_;
    rows.count = static_cast<int>(max(min(end - within, int64_t{kTransposedRows}), int64_t{0}));
    return rows;
  }

 private:
  // The last expert whose blocks begin at `block` or before it.
  __device__ TransposedRows rows_of_expert(int64_t block) const {
    int32_t low = 0;
    int32_t high = experts_;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (offsets_[middle] / kTransposedRows + middle <= block ? low : high) = middle;
    }
    const int32_t begin = offsets_[low];
    const int64_t within = (block - (begin / kTransposedRows + low)) * kTransposedRows;
    const int64_t rest = offsets_[low + 1] - begin - within;
    return {begin + within, static_cast<int>(max(min(rest, int64_t{kTransposedRows}), int64_t{0})),
            low};
  }

  const int32_t* offsets_;
  int32_t experts_;
  LiveRows live_;
  bool is_one_matrix_;
  int64_t matrix_rows_;
  int64_t matrix_blocks_;
  int64_t columns_;
  int64_t blocks_;
};

}  // namespace troupe
