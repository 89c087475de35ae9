#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/precision/scale_blocks.h"
#include "program/kernel.h"

namespace troupe {

// A thread for blocks of rows.
void transpose_codes_cpu(const KernelArguments& args) {
  const TensorView& input = args.input(0);
  const Shape& shape = input.shape;
  const auto* codes = static_cast<const uint8_t*>(input.data);
  auto* transposed = static_cast<uint8_t*>(args.output(0).data);
  const int64_t columns = shape.back();
  const int64_t matrix_rows = shape[shape.rank() - 2];
  const int64_t matrix_blocks = (matrix_rows + kTransposedRows - 1) / kTransposedRows;
  args.pool->parallel_ranges(args.output(0).shape[0], 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block % matrix_blocks * kTransposedRows;
      const int64_t rows = std::min<int64_t>(matrix_rows - first, kTransposedRows);
      const uint8_t* from = codes + (block / matrix_blocks * matrix_rows + first) * columns;
      uint8_t* to = transposed + block * columns * kTransposedRows;
      std::fill(to, to + columns * kTransposedRows, uint8_t{0});
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          to[column * kTransposedRows + row] = from[row * columns + column];
        }
      }
    }
  });
}

}  // namespace troupe
