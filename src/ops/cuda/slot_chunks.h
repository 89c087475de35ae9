// The chunks into which CUDA kernels cut slots to count and to number them by expert
// (slot_chunks.cuh): shared by the kernels and by the rules that book their scratch memory. The
// counterpart of ops/cpu/expert_slots.h.
#pragma once

#include <cstdint>

namespace troupe {

// A chunk is the work of one warp, which takes 32 slots at a time and so keeps their order.
inline constexpr int kChunkSlots = 256;

inline int64_t warp_chunks(int64_t slots) {
  return (slots + kChunkSlots - 1) / kChunkSlots;
}

}  // namespace troupe
