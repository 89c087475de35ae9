// Which elements of a tensor in 8 bits share a scale.
//
//   element = scale of its block * code
//
// A tensor is a matrix [R, C], or one for each expert: [E, N, K], or rows [R, C] that `offsets`
// (i32 [E + 1]) give to the experts. Each matrix is cut into blocks of its own, from its first row
// and column on; those at its end may be smaller. So the blocks of an expert depend on nothing but
// its own rows, and no padding is needed.
//
// Scales of           are
//   [R, C]            [row blocks, column blocks]
//   [E, N, K]         [E, row blocks, column blocks]
//   rows of experts   [E, column blocks] with one block for all rows of an expert; otherwise
//                     [R / rows + E, column blocks], of which expert e's begin at
//                     offsets[e] / rows + e. What is between them is unused.
// With blocks of one row the scales have the rows of the tensor, are ragged with it, and the
// experts make no difference.
//
// Products that sum over rows read transposed codes: each matrix in blocks of kTransposedRows rows,
// the last filled up with zeros, and of each block its transpose. So they are
//
//   [blocks, C, kTransposedRows]
//
// with blocks numbered as those of scales of 128 rows: matrix e of [E, N, K] has
// ceil(N / kTransposedRows) of them, expert e's rows begin with block
// offsets[e] / kTransposedRows + e. Blocks between them are zeros.
//
// Pure functions; any thread, and kernels on a GPU (a ScaleGrid as their parameter).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "base/dtype.h"
#include "base/shape.h"
#include "program/op_spec.h"

namespace troupe {

// How a scale follows from the largest magnitude of its block. Blocks of zeros have the scale 1.
enum class ScaleRule : uint8_t {
  ratio,         // f32: the largest element becomes the largest code, up to rounding
  power_of_two,  // f32: the least power of two that gives the largest element a code
  exponent,      // the same in u8, as E8M0: 2^(s - 127), 255 for NaN
  fp4,           // f32: of codes in 4 bits, by the matrix's largest element too (fp4_block.h)
};

constexpr DType scale_dtype(ScaleRule rule) {
  return rule == ScaleRule::exponent ? DType::u8 : DType::f32;
}

// Of a tensor whose rows belong to `experts`; 0: there are no offsets.
inline Shape scales_shape(const Shape& shape, BlockShape block, int64_t experts) {
  const auto blocks = [](int64_t extent, int64_t size) {
    return size == 0 ? 1 : (extent + size - 1) / size;
  };
  const int64_t columns = blocks(shape.back(), block.columns);
  if (shape.rank() == 3) return {shape[0], blocks(shape[1], block.rows), columns};
  if (experts == 0 || block.rows == 1) return {blocks(shape[0], block.rows), columns};
  return {block.rows == 0 ? experts : shape[0] / block.rows + experts, columns};
}

inline constexpr int32_t kTransposedRows = 128;

// Of the transposed codes of a tensor whose rows belong to `experts`; 0: there are no offsets.
inline Shape transposed_shape(const Shape& shape, int64_t experts) {
  const Shape blocks = scales_shape(shape, {kTransposedRows, 1}, experts);
  const int64_t count = blocks.elements() / shape.back();
  return {count, shape.back(), kTransposedRows};
}

// Rows of matrices that lie one below the other, cut without regard to where one begins: rows
// `first` on of `matrices` of `rows` each. Without matrices: none are cut.
struct MatrixRows {
  int64_t first = 0;
  int64_t rows = 0;
  int64_t matrices = 0;
  constexpr bool any() const { return matrices > 0; }
  bool operator==(const MatrixRows&) const = default;
};

class ScaleGrid {
 public:
  // `rows`: live ones, of all matrices. `offsets` [experts + 1] of rows of experts, or null.
  // `part`: of what matrices the tensor has rows; each then has one scale.
  ScaleGrid(const Shape& shape, int64_t rows, BlockShape block, const int32_t* offsets,
            int64_t experts, MatrixRows part = {})
      : block_(block),
        offsets_(block.rows == 1 ? nullptr : offsets),
        matrices_(offsets_ != nullptr ? experts
                  : shape.rank() == 3 ? shape[0]
                                      : 1),
        rows_(rows),
        first_row_(part.first),
        matrix_rows_(part.any()          ? part.rows
                     : shape.rank() == 3 ? shape[1]
                                         : rows),
        columns_(shape.back()),
        scale_columns_(block.columns == 0 ? 1 : (columns_ + block.columns - 1) / block.columns) {}

  constexpr int64_t rows() const { return rows_; }
  constexpr int64_t matrices() const { return matrices_; }
  constexpr int64_t columns() const { return columns_; }
  constexpr int64_t scale_columns() const { return scale_columns_; }
  // Elements of a row that share a scale, but at its end.
  constexpr int64_t block_columns() const {
    return block_.columns == 0 ? columns_ : block_.columns;
  }

  // The row of scales that a row of the tensor, in all matrices, belongs to.
  constexpr int64_t scale_row(int64_t row) const {
    const int64_t matrix = matrix_of(first_row_ + row);
    if (block_.rows == 0) return matrix;
    return first_of(matrix) + (row - begin_of(matrix)) / block_.rows;
  }

  // Of a row with which a block begins, the block's rows that there are; of others 0.
  constexpr int64_t rows_of_block(int64_t row) const {
    const int64_t matrix = matrix_of(row);
    if ((row - begin_of(matrix)) % block_.rows != 0) return 0;
    int64_t end = rows_;
    if (offsets_ != nullptr) {
      end = offsets_[matrix + 1];
    } else if (matrices_ > 1) {
      end = begin_of(matrix + 1);
    }
    return row + block_.rows < end ? block_.rows : end - row;
  }

  // Where the row lies in its block of that many rows; blocks have some.
  constexpr int64_t row_in_block(int64_t row) const {
    const int64_t matrix = matrix_of(row);
    return (row - begin_of(matrix)) % block_.rows;
  }

 private:
  constexpr int64_t matrix_of(int64_t row) const {
    return offsets_ == nullptr ? row / matrix_rows_ : expert_of(row);
  }
  constexpr int64_t begin_of(int64_t matrix) const {
    return offsets_ == nullptr ? matrix * matrix_rows_ : offsets_[matrix];
  }
  constexpr int64_t first_of(int64_t matrix) const {
    if (offsets_ != nullptr) return offsets_[matrix] / block_.rows + matrix;
    return matrix * ((matrix_rows_ + block_.rows - 1) / block_.rows);
  }
  // The last whose rows begin at `row` or before it: those after it without rows begin later.
  constexpr int64_t expert_of(int64_t row) const {
    int64_t low = 0;
    int64_t high = matrices_;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (offsets_[middle] <= row ? low : high) = middle;
    }
    return low;
  }

  BlockShape block_;
  const int32_t* offsets_;
  int64_t matrices_;
  int64_t rows_;
  int64_t first_row_;  // where matrices are cut
  int64_t matrix_rows_;
  int64_t columns_;
  int64_t scale_columns_;
};

// The s of 2^(s - 127), the least power of two that gives a number a code in e4m3, given the bits
// of its magnitude. The largest code is 1.75 * 2^8.
constexpr uint8_t scale_exponent(uint32_t largest) {
  const uint32_t exponent = largest >> 23;
  if (exponent == 255) return largest > 0x7f800000U ? 255 : 254;
  if (largest == 0) return 127;
  const uint32_t above = (largest & 0x7fffffU) > 0x600000U ? 1 : 0;
  return static_cast<uint8_t>(exponent + above > 9 ? exponent + above - 8 : 1);
}

constexpr float exponent_scale(uint8_t s) {
  if (s == 255) return std::numeric_limits<float>::quiet_NaN();
  return s == 0 ? 0x1p-127F : std::bit_cast<float>(static_cast<uint32_t>(s) << 23);
}

}  // namespace troupe
