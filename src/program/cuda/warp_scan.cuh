// Sums over the lanes of a warp up to each one. All 32 lanes call them together.
#pragma once

#include <cstdint>

namespace troupe {

// Of this lane's value and those of all lanes before it.
__device__ __forceinline__ int32_t warp_prefix_sum(int32_t value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t before = __shfl_up_sync(0xffffffffU, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

}  // namespace troupe
