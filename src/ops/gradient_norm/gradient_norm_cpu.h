// The chunks into which the CPU kernel of squared_norms splits each gradient: shared by the kernel
// and by the rule that books its workspace. Private to this folder.
#pragma once

#include <cstdint>

namespace troupe {

inline constexpr int64_t kNormChunkElements = 32768;

inline int64_t norm_chunks(int64_t elements) {
  return (elements + kNormChunkElements - 1) / kNormChunkElements;
}

}  // namespace troupe
