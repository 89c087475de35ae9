// The chunks into which the CPU kernel of squared_norm splits each gradient: shared by the kernel
// and by the rule that books its workspace. Private to this folder.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/shape.h"

namespace troupe {

inline constexpr int64_t kNormChunkElements = 32768;

inline int64_t norm_chunks(int64_t elements) {
  return (elements + kNormChunkElements - 1) / kNormChunkElements;
}

// Of the first `rows` rows (0: of all).
inline int64_t counted_elements(const Shape& shape, int64_t rows) {
  return rows > 0 ? std::min(rows, shape[0]) * shape.row_elements() : shape.elements();
}

}  // namespace troupe
