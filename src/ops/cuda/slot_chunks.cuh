// Counting and numbering of slots by expert on a GPU, in three launches: each chunk of slots counts
// its slots per expert (count_slots_kernel); a warp for each expert adds up those of earlier chunks
// (scan_chunks); each chunk goes through its slots again (walk_chunk).
#pragma once

#include "ops/cuda/slot_chunks.h"
#include "program/cuda/device.cuh"
#include "program/cuda/warp_scan.cuh"

namespace troupe {
namespace {

// Calls each(slot, expert, rank) for the slots of this warp's chunk, the block's, where `rank`
// counts the slots of the same expert before, from next[expert] on; next[] is moved on. A slot
// without expert is reported with expert and rank -1. `next` is shared memory.
template <class Each>
__device__ __forceinline__ void walk_chunk(const int32_t* indices, int64_t slots, int32_t experts,
                                           int32_t* next, const Each& each) {
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t begin = int64_t{blockIdx.x} * kChunkSlots + lane;
  int32_t chosen[kChunkSlots / 32];  // all on their way at once
#pragma unroll
  for (int i = 0; i < kChunkSlots / 32; ++i) {
    const int64_t slot = begin + i * 32;
    const int32_t expert = slot < slots ? indices[slot] : -1;
    chosen[i] = expert >= 0 && expert < experts ? expert : -1;
  }
#pragma unroll
  for (int i = 0; i < kChunkSlots / 32; ++i) {
    const int64_t slot = begin + i * 32;
    const int32_t expert = chosen[i];
    const uint32_t same = __match_any_sync(0xffffffffU, expert);
    const int32_t rank = expert < 0 ? -1 : next[expert] + __popc(same & ((1U << lane) - 1U));
    __syncwarp();
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) next[expert] += __popc(same);
    __syncwarp();
    if (slot < slots) each(slot, expert, rank);
  }
}

// A block of one warp for each chunk. histograms[e][chunk]: the slots of expert e in the chunk.
__global__ void count_slots_kernel(const int32_t* indices, int64_t slots, int32_t experts,
                                   int32_t* histograms) {
  extern __shared__ int32_t next[];
  for_row(experts, [=](int64_t e) { next[e] = 0; });
  __syncwarp();
  walk_chunk(indices, slots, experts, next, [](int64_t, int32_t, int32_t) {});
  for_row(experts, [=](int64_t e) { histograms[e * gridDim.x + blockIdx.x] = next[e]; });
}

// By a warp: the chunks' counts of one expert become those of earlier chunks, kScanChunks times 32
// at a time. Returns the count of all.
__device__ __forceinline__ int32_t scan_chunks(int32_t* cells, int64_t chunks) {
  constexpr int kScanChunks = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int32_t total = 0;
  for (int64_t first = lane; first < chunks + lane; first += 32 * kScanChunks) {
    int32_t own[kScanChunks];
#pragma unroll
    for (int i = 0; i < kScanChunks; ++i) {
      own[i] = first + 32 * i < chunks ? cells[first + 32 * i] : 0;
    }
#pragma unroll
    for (int i = 0; i < kScanChunks; ++i) {
      const int32_t through = warp_prefix_sum(own[i]);
      if (first + 32 * i < chunks) cells[first + 32 * i] = total + through - own[i];
      total += __shfl_sync(0xffffffffU, through, 31);
    }
  }
  return total;
}

}  // namespace
}  // namespace troupe
