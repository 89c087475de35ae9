// The scratch memory of matrix products through cuBLASLt (ops/cuda/context.h), which rules of
// private memory state in every build.
#pragma once

#include <cstdint>

namespace troupe {

inline constexpr uint64_t kProductScratchBytes = uint64_t{32} << 20;

// What kernels put one after the other into their scratch memory.
constexpr uint64_t align_scratch(uint64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

}  // namespace troupe
