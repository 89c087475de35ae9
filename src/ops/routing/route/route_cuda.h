// The chunks into which the CUDA kernel of route cuts the slots: shared by the kernel and by the
// rule that books its scratch memory. Private to this folder.
#pragma once

#include <cstdint>

namespace troupe {

// A chunk is the work of one warp, which takes 32 slots at a time and so keeps their order.
inline constexpr int kChunkSlots = 256;

inline int64_t warp_chunks(int64_t slots) {
  return (slots + kChunkSlots - 1) / kChunkSlots;
}

}  // namespace troupe
