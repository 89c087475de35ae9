// A coded row is bytes: the codes (e4m3) of its w elements, then their w / 32 scales (e8m0), then
// zeros up to a multiple of 16 bytes. w is a multiple of 32.
#pragma once

#include <cstdint>

namespace troupe {

inline constexpr int64_t kCodedBlock = 32;  // elements that share a scale

constexpr int64_t coded_row_bytes(int64_t elements) {
  return (elements + elements / kCodedBlock + 15) / 16 * 16;
}

}  // namespace troupe
