// The k largest of a few scores, by one warp: the counterpart of ops/cpu/topk.h, with the same
// choice in every case. NaN counts as -infinity.
#pragma once

#include "program/cuda/device.cuh"

namespace troupe {

// A score, or NaN for one that may not be taken.
template <class T>
__device__ __forceinline__ T score_or_none(T score) {
  const T none = -infinity<T>();
  return score > none ? score : none;
}

// Fills index[top_k] from scores[n], where NaN marks scores that may not be taken; of the
// others there are at least top_k. Each score that is taken becomes NaN. All lanes of the warp take
// part; `scores` and `index` are shared memory, or global memory of this warp.
template <class T>
__device__ __forceinline__ void take_largest(T* scores, int n, int top_k, int32_t* index) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int slot = 0; slot < top_k; ++slot) {
    T best = -infinity<T>();
    int place = INT32_MAX;
    for (int i = lane; i < n; i += 32) {
      const T score = scores[i];
      // The first of equals, also of -infinity; NaN is neither larger nor equal.
      if (score > best || (score == best && i < place)) {
        best = score;
        place = i;
      }
    }
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      const T other = __shfl_xor_sync(0xffffffffU, best, width);
      const int other_place = __shfl_xor_sync(0xffffffffU, place, width);
      if (other > best || (other == best && other_place < place)) {
        best = other;
        place = other_place;
      }
    }
    __syncwarp();
    if (lane == 0) {
      index[slot] = place;
      scores[place] = static_cast<T>(NAN);
    }
    __syncwarp();
  }
}

}  // namespace troupe
