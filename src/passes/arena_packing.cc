#include "passes/arena_packing.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

namespace troupe {
namespace {

// Addresses that are taken, as ranges in ascending order of which no two touch.
class TakenAddresses {
  struct Range {
    uint64_t begin, end;
  };

 public:
  bool empty() const { return ranges_.empty(); }

  void add(uint64_t begin, uint64_t end) {
    const auto first = std::partition_point(ranges_.begin(), ranges_.end(),
                                            [&](const Range& range) { return range.end < begin; });
    auto last = first;
    for (; last != ranges_.end() && last->begin <= end; ++last) {
      begin = std::min(begin, last->begin);
      end = std::max(end, last->end);
    }
    if (first == last) {
      ranges_.insert(first, {begin, end});
    } else {
      *first = {begin, end};
      ranges_.erase(first + 1, last);
    }
  }

  // A walk through the ranges, upwards.
  class Walk {
   public:
    explicit Walk(const TakenAddresses& taken)
        : next_(taken.ranges_.data()), end_(next_ + taken.ranges_.size()) {}

    // The lowest address from `address` on that has `bytes` free bytes; no call may ask for a lower
    // address than the one before.
    uint64_t find_free(uint64_t address, uint64_t bytes) {
      if (next_ != end_ && next_->end <= address) {
        next_ = std::partition_point(next_ + 1, end_,
                                     [&](const Range& taken) { return taken.end <= address; });
      }
      for (; next_ != end_ && next_->begin < address + bytes; ++next_) address = next_->end;
      return address;
    }

   private:
    const Range* next_;
    const Range* end_;
  };

 private:
  std::vector<Range> ranges_;
};

// Which addresses are taken when: a segment tree over time. A block is known to the few nodes that
// together are its life, and to all nodes above them; so finding room looks at a few dozen lists
// however many blocks there are.
class TakenOverTime {
 public:
  explicit TakenOverTime(int32_t times)
      : times_(std::bit_ceil(static_cast<uint32_t>(std::max(times, 1)))),
        nodes_(2 * size_t{times_}) {}

  // The lowest address at which the block is free of all that were added.
  uint64_t find_free(const MemoryBlock& block) const {
    std::vector<TakenAddresses::Walk> lists;
    visit(block, [&](size_t node, bool within) {
      const TakenAddresses& taken = within ? nodes_[node].part_of_the_time : nodes_[node].always;
      if (!taken.empty()) lists.emplace_back(taken);
    });
    uint64_t address = 0;
    for (uint64_t before = 1; before != address;) {
      before = address;
      for (TakenAddresses::Walk& list : lists) address = list.find_free(address, block.bytes);
    }
    return address;
  }

  void add(const MemoryBlock& block, uint64_t address) {
    if (block.bytes == 0) return;
    visit(block, [&](size_t node, bool within) {
      nodes_[node].part_of_the_time.add(address, address + block.bytes);
      if (within) nodes_[node].always.add(address, address + block.bytes);
    });
  }

 private:
  // What is taken during all of a node's time, by blocks that no node above it has there; and
  // during any of it, by blocks of the node and those below it.
  struct Node {
    TakenAddresses always;
    TakenAddresses part_of_the_time;
  };

  // Calls function(node, within) for the nodes that share time with the block, from the root to the
  // first that lie `within` its life.
  template <class Function>
  void visit(const MemoryBlock& block, const Function& function) const {
    struct Span {
      size_t node;
      int64_t first, last;
    };
    std::array<Span, 2 * 32> pending;  // two of each level below the root at most
    size_t count = 0;
    pending[count++] = {1, 0, int64_t{times_} - 1};
    while (count > 0) {
      const auto [node, first, last] = pending[--count];
      if (last < block.first || block.last < first) continue;
      const bool within = block.first <= first && last <= block.last;
      function(node, within);
      if (within) continue;
      const int64_t middle = (first + last) / 2;
      pending[count++] = {2 * node, first, middle};
      pending[count++] = {2 * node + 1, middle + 1, last};
    }
  }

  uint32_t times_;
  std::vector<Node> nodes_;  // from 1; those below node i are 2 i and 2 i + 1
};

int32_t times_of(const std::vector<MemoryBlock>& blocks) {
  int32_t times = 0;
  for (const MemoryBlock& block : blocks) times = std::max(times, block.last + 1);
  return times;
}

// The most that is needed at one time: no arena is lower.
uint64_t least_height(const std::vector<MemoryBlock>& blocks) {
  std::vector<uint64_t> change(static_cast<size_t>(times_of(blocks)) + 1);  // modulo 2^64
  for (const MemoryBlock& block : blocks) {
    change[static_cast<size_t>(block.first)] += block.bytes;
    change[static_cast<size_t>(block.last) + 1] -= block.bytes;
  }
  uint64_t most = 0;
  uint64_t needed = 0;
  for (const uint64_t each : change) most = std::max(most, needed += each);
  return most;
}

// Gives the blocks addresses in the given order, each the lowest address that is free during its
// whole life. Gives up where the arena would not stay below `limit`.
std::optional<Placement> assign_addresses(const std::vector<MemoryBlock>& blocks,
                                          const std::vector<int32_t>& order, uint64_t limit) {
  Placement placement{std::vector<uint64_t>(blocks.size()), 0};
  TakenOverTime taken(times_of(blocks));
  for (const int32_t candidate : order) {
    const MemoryBlock& block = blocks[static_cast<size_t>(candidate)];
    const uint64_t address = taken.find_free(block);
    placement.height = std::max(placement.height, address + block.bytes);
    if (placement.height >= limit) return std::nullopt;
    taken.add(block, address);
    placement.offsets[static_cast<size_t>(candidate)] = address;
  }
  return placement;
}

}  // namespace

Placement place_blocks(const std::vector<MemoryBlock>& blocks) {
  std::vector<int32_t> order(blocks.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t i) -> const MemoryBlock& { return blocks[static_cast<size_t>(i)]; };
  const auto length = [&](int32_t i) { return at(i).last - at(i).first; };

  Placement best{{}, std::numeric_limits<uint64_t>::max()};
  const uint64_t least = least_height(blocks);
  const auto attempt = [&](const auto& before) {
    if (best.height == least) return;
    std::stable_sort(order.begin(), order.end(), before);
    if (auto lower = assign_addresses(blocks, order, best.height)) best = std::move(*lower);
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
