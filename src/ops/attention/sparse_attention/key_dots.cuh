// Products of rows by one warp, for the plain kernels of sparse attention and of its indexer.
#pragma once

#include "program/cuda/device.cuh"

namespace troupe {

// a . b of n elements, on all lanes.
template <class T>
__device__ __forceinline__ accumulation_t<T> warp_dot(const T* a, const T* b, int n) {
  accumulation_t<T> sum = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < n; i += 32) sum += widen(a[i]) * widen(b[i]);
  return warp_sum(sum);
}

}  // namespace troupe
