// The chunks into which the CPU kernel of squared_norm splits each gradient: shared by the kernel
// and by the rule that books its workspace. Private to this folder.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/shape.h"
#include "ops/optimizer/gradient_norm/gradient_norm.h"

namespace troupe {

inline constexpr int64_t kNormChunkElements = 32768;

inline int64_t norm_chunks(const IndexRange& elements) {
  return (elements.end - elements.begin + kNormChunkElements - 1) / kNormChunkElements;
}

inline IndexRange counted_elements(const Shape& shape, const SquaredNormAttributes& attributes) {
  IndexRange counted = shard_of(shape, attributes.shard);
  if (attributes.rows > 0) {
    counted.end = std::min(counted.end, attributes.rows * shape.row_elements());
    counted.begin = std::min(counted.begin, counted.end);
  }
  return counted;
}

}  // namespace troupe
