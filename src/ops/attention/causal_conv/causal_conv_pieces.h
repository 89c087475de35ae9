// Into how many pieces the CUDA kernels cut the sum over rows of a causal convolution's weight
// gradient. The same number for every GPU: the pieces decide the order of the sums.
#pragma once

#include <algorithm>
#include <cstdint>

namespace troupe {

inline constexpr int64_t kConvPieceRows = 64;

constexpr int64_t conv_pieces(int64_t rows) {
  return std::max<int64_t>(1, (rows + kConvPieceRows - 1) / kConvPieceRows);
}

}  // namespace troupe
