// The products of codes on tensor cores (codes_product.h), and where they keep transposed operands:
// for their kernels and the rule that books their memory. Pure functions; any thread, and kernels
// on a GPU.
#pragma once

#include <cstdint>

#include "base/shape.h"
#include "ops/product_scratch.h"

namespace troupe {

enum class CodesProduct : uint8_t { forward, data_gradient, weight_gradient };

// Transposed codes of groups' rows: where the columns of a group begin whose rows begin at `begin`,
// and all columns of `rows` rows. After each group's are zeros up to a multiple of kCodePadding.
inline constexpr int32_t kCodePadding = 128;
constexpr int32_t padded_begin(int32_t begin, int32_t group) {
  return (begin / kCodePadding + group) * kCodePadding;
}
constexpr int64_t padded_columns(int64_t rows, int64_t groups) {
  return (rows / kCodePadding + groups) * kCodePadding;
}

struct CodesScratch {
  CodesScratch(const Shape& left, const Shape& right, int64_t groups, CodesProduct product) {
    if (product == CodesProduct::data_gradient) {
      right_bytes = static_cast<uint64_t>(right.elements());
    } else if (product == CodesProduct::weight_gradient) {
      const int64_t columns = padded_columns(left[0], groups);
      left_bytes = static_cast<uint64_t>(columns * left[1]);
      right_bytes = static_cast<uint64_t>(columns * right[1]);
    }
    left_at = kOffsetsBytes;
    right_at = left_at + align_scratch(left_bytes);
    bytes = right_at + align_scratch(right_bytes);
  }

  // First the offsets of dense products: of one group.
  static constexpr uint64_t kOffsetsBytes = 256;

  uint64_t left_bytes = 0;
  uint64_t right_bytes = 0;
  uint64_t left_at = 0;
  uint64_t right_at = 0;
  uint64_t bytes = 0;
};

}  // namespace troupe
