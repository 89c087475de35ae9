// Packing: addresses for pieces of memory, some of which are needed at the same time, in an arena
// that is as low as a few good orders make it. Knows nothing of programs; pure functions.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

namespace troupe {

// A piece of memory that is needed from time `first` to time `last`, both included.
struct MemoryBlock {
  int32_t first;
  int32_t last;
  uint64_t bytes;
  auto operator<=>(const MemoryBlock&) const = default;
};

struct Placement {
  std::vector<uint64_t> offsets;  // of the blocks
  uint64_t height = 0;            // of the arena
};

// Tries a few orders and keeps the lowest arena. Largest first is nearly always best; the others
// win where many equal blocks overlap in a staircase.
Placement place_blocks(const std::vector<MemoryBlock>& blocks);

// Counts time in the operations at which something begins or ends: what else stands between them
// makes no difference to a placement.
void compress_times(std::vector<MemoryBlock>& blocks);

}  // namespace troupe
