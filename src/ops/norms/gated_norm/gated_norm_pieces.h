// Into how many pieces the CUDA kernels cut the sum over rows and heads of a gated norm's gain. The
// same number for every GPU: the pieces decide the order of the sums.
#pragma once

#include <algorithm>
#include <cstdint>

namespace troupe {

inline constexpr int64_t kGatedNormMostPieces = 512;

// Of `heads` heads of all rows together: at least 64 in a piece.
constexpr int64_t gated_norm_pieces(int64_t heads) {
  return std::clamp<int64_t>((heads + 63) / 64, 1, kGatedNormMostPieces);
}

}  // namespace troupe
