// The products of codes on tensor cores (codes_product.h), and where they keep transposed operands:
// for their kernels and the rule that books their memory. Pure functions.
#pragma once

#include <cstdint>

#include "base/shape.h"

namespace troupe {

enum class CodesProduct : uint8_t { forward, data_gradient, weight_gradient };

struct CodesScratch {
  // Columns of transposed rows of groups, each padded to a multiple of this.
  static constexpr int64_t kPadding = 128;

  CodesScratch(const Shape& left, const Shape& right, int64_t groups, CodesProduct product) {
    if (product == CodesProduct::data_gradient) {
      right_bytes = static_cast<uint64_t>(right.elements());
    } else if (product == CodesProduct::weight_gradient) {
      const int64_t columns = (left[0] / kPadding + groups) * kPadding;
      left_bytes = static_cast<uint64_t>(columns * left[1]);
      right_bytes = static_cast<uint64_t>(columns * right[1]);
    }
    left_at = kOffsetsBytes;
    right_at = left_at + align(left_bytes);
    bytes = right_at + align(right_bytes);
  }

  // First the offsets of dense products: of one group.
  static constexpr uint64_t kOffsetsBytes = 256;
  static constexpr uint64_t align(uint64_t size) { return (size + 255) / 256 * 256; }

  uint64_t left_bytes = 0;
  uint64_t right_bytes = 0;
  uint64_t left_at = 0;
  uint64_t right_at = 0;
  uint64_t bytes = 0;
};

}  // namespace troupe
