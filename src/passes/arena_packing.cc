#include "passes/arena_packing.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace troupe {
namespace {

// Gives the blocks addresses in the given order, each the lowest address that is free during its
// whole life. Returns the height of the arena.
uint64_t assign_addresses(const std::vector<MemoryBlock>& blocks, const std::vector<int32_t>& order,
                          std::vector<uint64_t>& offsets) {
  uint64_t height = 0;
  std::vector<int32_t> placed;  // by ascending address
  placed.reserve(blocks.size());
  for (const int32_t candidate : order) {
    const MemoryBlock& block = blocks[static_cast<size_t>(candidate)];
    uint64_t address = 0;
    for (const int32_t other : placed) {
      const MemoryBlock& neighbour = blocks[static_cast<size_t>(other)];
      if (neighbour.last < block.first || block.last < neighbour.first) continue;
      const uint64_t start = offsets[static_cast<size_t>(other)];
      if (address + block.bytes <= start) break;
      address = std::max(address, start + neighbour.bytes);
    }
    offsets[static_cast<size_t>(candidate)] = address;
    height = std::max(height, address + block.bytes);
    const auto position = std::upper_bound(
        placed.begin(), placed.end(), address,
        [&](uint64_t value, int32_t other) { return value < offsets[static_cast<size_t>(other)]; });
    placed.insert(position, candidate);
  }
  return height;
}

}  // namespace

Placement place_blocks(const std::vector<MemoryBlock>& blocks) {
  std::vector<int32_t> order(blocks.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t i) -> const MemoryBlock& { return blocks[static_cast<size_t>(i)]; };
  const auto length = [&](int32_t i) { return at(i).last - at(i).first; };

  Placement best;
  const auto attempt = [&](const auto& before) {
    std::stable_sort(order.begin(), order.end(), before);
    Placement placement{std::vector<uint64_t>(blocks.size()), 0};
    placement.height = assign_addresses(blocks, order, placement.offsets);
    if (best.offsets.empty() || placement.height < best.height) best = std::move(placement);
  };
  attempt([&](int32_t a, int32_t b) { return at(a).bytes > at(b).bytes; });
  attempt([&](int32_t a, int32_t b) { return length(a) > length(b); });
  attempt([&](int32_t a, int32_t b) {
    return at(a).bytes * static_cast<uint64_t>(length(a) + 1) >
           at(b).bytes * static_cast<uint64_t>(length(b) + 1);
  });
  attempt([&](int32_t a, int32_t b) { return at(a).first < at(b).first; });
  return best;
}

void compress_times(std::vector<MemoryBlock>& blocks) {
  std::vector<int32_t> times;
  for (const MemoryBlock& block : blocks) {
    times.push_back(block.first);
    times.push_back(block.last);
  }
  std::sort(times.begin(), times.end());
  times.erase(std::unique(times.begin(), times.end()), times.end());
  const auto number = [&](int32_t time) {
    return static_cast<int32_t>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
  };
  for (MemoryBlock& block : blocks) {
    block.first = number(block.first);
    block.last = number(block.last);
  }
}

}  // namespace troupe
