// How kernels go through a tensor in 8 bits, or one that becomes that, and know the scales of what
// they read: a warp takes a strip of 32 rows, as wide as its lanes read at once. Each lane looks up
// the row of scales of one of these rows.
//
// Device functions, and sizes of launches.
#pragma once

#include "ops/precision/quantization.h"
#include "program/cuda/device.cuh"

namespace troupe {

inline constexpr int kStripRows = 32;
inline constexpr int kStripThreads = 256;  // eight strips

// Codes of elements side by side, moved at once.
template <int kStep>
struct alignas(kStep) CodePack {
  uint8_t codes[kStep];
};

// `rounds`: to bf16 first, which f32 is more than.
template <class T>
__device__ __forceinline__ float number_of(T x, bool rounds) {
  if constexpr (std::is_same_v<T, float>) {
    if (rounds) return widen(round_to<Bf16>(x));
  }
  return static_cast<float>(widen(x));
}

// Of which row of x a row is made that is quantised (ops/precision/quantize).
struct SourceRows {
  const int32_t* row_slot = nullptr;  // null: each of itself
  int32_t top_k = 1;

  // Negative: of none, it is a filler.
  __device__ __forceinline__ int64_t of(int64_t row) const {
    if (row_slot == nullptr) return row;
    const int32_t slot = row_slot[row];
    return slot < 0 ? -1 : slot / top_k;
  }
};

// Input 3 of quantize; block_amax has none.
inline SourceRows source_rows_of(const CudaKernelArguments& args) {
  if (args.inputs.size() <= 3) return {};
  return {args.in<int32_t>(3), args.attributes->as<QuantizeAttributes>().top_k};
}

// What is quantised, as far as it has a shape: x, or rows gathered from it.
inline CudaTensor quantized_tensor(const CudaKernelArguments& args) {
  CudaTensor x = args.input(0);
  if (args.inputs.size() <= 3) return x;
  const CudaTensor& row_slot = args.input(3);
  x.shape = {row_slot.shape[0], x.shape[1]};
  x.live_rows = row_slot.live_rows;
  x.expected_rows = row_slot.expected_rows;
  return x;
}

// The scales of an operand; the rows that are live are the kernel's to find.
inline ScaleGrid cuda_grid_of(const CudaTensor& x, BlockShape block, const CudaTensor& offsets,
                              const MatrixRows& part = {}) {
  const int64_t rows = x.shape.rank() == 3 ? x.shape[0] * x.shape[1] : x.shape[0];
  return {x.shape,
          rows,
          block,
          static_cast<const int32_t*>(offsets.data),
          offsets.data == nullptr ? 0 : offsets.shape[0] - 1,
          part};
}

// The live rows of all matrices.
inline LiveRows live_rows_of(const CudaTensor& x, const ScaleGrid& grid) {
  LiveRows rows(x);
  rows.bound = grid.rows();
  return rows;
}

// Blocks of kStripThreads; each lane reads `step` elements of a row.
inline unsigned strip_blocks(const ScaleGrid& grid, int step) {
  const int64_t strips =
      ceil_divide(grid.rows(), kStripRows) * ceil_divide(grid.columns(), 32 * step);
  return static_cast<unsigned>(std::max<int64_t>(1, ceil_divide(strips, kStripThreads / 32)));
}

// The strip of a warp.
class RowStrip {
 public:
  // `live`: rows that are there.
  __device__ RowStrip(const ScaleGrid& grid, int64_t live, int step) {
    const int64_t across = (grid.columns() + 32 * step - 1) / (32 * step);
    const int64_t strip = int64_t{blockIdx.x} * (kStripThreads / 32) + threadIdx.x / 32;
    row_ = strip / across * kStripRows;
    rows_ = static_cast<int>(min(live - row_, int64_t{kStripRows}));
    column_ = (strip % across * 32 + threadIdx.x % 32) * step;
  }

  __device__ int64_t row() const { return row_; }        // the first
  __device__ int rows() const { return rows_; }          // not positive: none
  __device__ int64_t column() const { return column_; }  // the lane's first; may be beyond the row

  // Of row() + lane; -1 beyond the strip.
  __device__ int64_t scale_row_of_lane(const ScaleGrid& grid) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return lane < rows_ ? grid.scale_row(row_ + lane) : -1;
  }

 private:
  int64_t row_;
  int64_t column_;
  int rows_;
};

}  // namespace troupe
