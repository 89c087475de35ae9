// Placement of blocks: no two share an address at one time, and each lies where a plain search over
// all blocks would put it.
#include "passes/arena_packing.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>

namespace troupe {
namespace {

std::vector<MemoryBlock> random_blocks(int count, int32_t times, int32_t longest, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<MemoryBlock> blocks;
  for (int i = 0; i < count; ++i) {
    const auto first = static_cast<int32_t>(random() % static_cast<uint32_t>(times));
    const auto length = static_cast<int32_t>(random() % static_cast<uint32_t>(longest));
    blocks.push_back({first, std::min(first + length, times - 1), 256 * (1 + random() % 40)});
  }
  return blocks;
}

bool live_together(const MemoryBlock& a, const MemoryBlock& b) {
  return a.first <= b.last && b.first <= a.last;
}

// The height when each block, largest first, gets the lowest address that no earlier one has.
uint64_t height_by_plain_search(std::vector<MemoryBlock> blocks) {
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  std::vector<uint64_t> offsets(blocks.size());
  uint64_t height = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    uint64_t address = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t j = 0; j < i; ++j) {
        const bool apart =
            address + blocks[i].bytes <= offsets[j] || offsets[j] + blocks[j].bytes <= address;
        if (apart || !live_together(blocks[i], blocks[j])) continue;
        address = offsets[j] + blocks[j].bytes;
        moved = true;
      }
    }
    offsets[i] = address;
    height = std::max(height, address + blocks[i].bytes);
  }
  return height;
}

TEST(ArenaPacking, BlocksThatLiveTogetherDoNotOverlap) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<MemoryBlock> blocks = random_blocks(200, 1 + 13 * seed, 1 + 7 * seed, seed);
    const Placement placement = place_blocks(blocks);
    for (size_t i = 0; i < blocks.size(); ++i) {
      ASSERT_LE(placement.offsets[i] + blocks[i].bytes, placement.height);
      for (size_t j = 0; j < i; ++j) {
        if (!live_together(blocks[i], blocks[j])) continue;
        ASSERT_TRUE(placement.offsets[i] + blocks[i].bytes <= placement.offsets[j] ||
                    placement.offsets[j] + blocks[j].bytes <= placement.offsets[i])
            << "blocks " << j << " and " << i << ", seed " << seed;
      }
    }
  }
}

TEST(ArenaPacking, IsNeverHigherThanAPlainSearch) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<MemoryBlock> blocks = random_blocks(150, 100, 1 + 10 * seed, 100 + seed);
    EXPECT_LE(place_blocks(blocks).height, height_by_plain_search(blocks)) << "seed " << seed;
  }
}

// At time 5 all but the second are needed.
TEST(ArenaPacking, IsAsLowAsWhatIsNeededAtOnce) {
  const Placement placement =
      place_blocks({{0, 9, 512}, {0, 3, 256}, {2, 6, 256}, {4, 9, 256}, {5, 5, 1024}});
  EXPECT_EQ(placement.height, 512u + 256 + 256 + 1024);
}

TEST(ArenaPacking, OfNothingIsEmpty) {
  EXPECT_EQ(place_blocks({}).height, 0u);
}

}  // namespace
}  // namespace troupe
