#include "ops/experts/grouped_linear/grouped_variant.h"

#include <algorithm>
#include <limits>

#include "program/cuda_kernel.h"

namespace troupe {
namespace {

// Rows of a group's result, on average, from which blocks work in pairs. Of an odd number of tiles
// one has no neighbour to share with but waits for it all the same, which counts for more the fewer
// there are; fewer rows were not tried. (docs/benchmarks/cuda.md; measure in whole steps: by
// themselves, the variants of this kernel rank otherwise.)
constexpr int64_t kPairRows = 256;

}  // namespace

GroupedVariant tiled_variant(int64_t rows_of_group) {
  return rows_of_group >= kPairRows ? GroupedVariant::sm90_pair : GroupedVariant::sm90;
}

bool has_tiled_rows(const Shape& shape, DType dtype) {
  for (int i = 0; i < shape.rank(); ++i) {
    if (shape[i] < 1 || shape[i] > std::numeric_limits<int32_t>::max()) return false;
  }
  return is_made_of_packs(shape.back(), dtype);
}

bool has_tiled_operands(const OpView& op, DType dtype) {
  return has_tiled_rows(op.input(0).shape, dtype) && has_tiled_rows(op.input(1).shape, dtype) &&
         has_tiled_rows(op.output(0).shape, dtype);
}

// With experts on several ranks the buffer has room for many times as many rows as are expected.
int64_t expected_rows_of_group(const Value& rows, int64_t experts) {
  const int64_t expected = rows.rows.expected > 0 ? rows.rows.expected : rows.shape[0];
  return std::min(expected, rows.shape[0]) / experts;
}

}  // namespace troupe
