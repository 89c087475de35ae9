// Choices of keys for samples and tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/attention/sparse_attention/key_positions.h"

namespace troupe {

// For each query its own position and every `stride`-th one before it, the nearest `most` of them,
// in ascending order; then -1.
inline std::vector<int32_t> strided_choice(const KeyRows& rows, int64_t most, int64_t stride) {
  std::vector<int32_t> chosen;
  for (int64_t query = 0; query < rows.queries(); ++query) {
    const int64_t position = rows.position(query);
    const int64_t count = std::min(most, position / stride + 1);
    for (int64_t i = 0; i < most; ++i) {
      chosen.push_back(i < count ? static_cast<int32_t>(position - (count - 1 - i) * stride) : -1);
    }
  }
  return chosen;
}

}  // namespace troupe
