#include "data/byte_pairs.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace troupe {

BytePairs::BytePairs(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges)
    : byte_ids_(byte_ids) {
  // At most half full, so a search ends after a step or two.
  const int bits = std::max<int>(4, std::bit_width(2 * merges.size()));
  shift_ = 64 - bits;
  slots_.resize(size_t{1} << bits);
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    size_t at = first_slot(merge.left, merge.right);
    while (slots_[at].result != kNone &&
           (slots_[at].left != merge.left || slots_[at].right != merge.right)) {
      at = (at + 1) & (slots_.size() - 1);
    }
    slots_[at] = {merge.left, merge.right, static_cast<int32_t>(rank), merge.result};
  }
}

size_t BytePairs::first_slot(int32_t left, int32_t right) const {
  const uint64_t key = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  // Knuth's multiplicative hash: the high bits of a product with 2^64 divided by the golden ratio.
  return static_cast<size_t>((key * 0x9e3779b97f4a7c15) >> shift_);
}

const BytePairs::Slot& BytePairs::find(int32_t left, int32_t right) const {
  size_t at = first_slot(left, right);
  while (slots_[at].result != kNone && (slots_[at].left != left || slots_[at].right != right)) {
    at = (at + 1) & (slots_.size() - 1);
  }
  return slots_[at];
}

namespace {

// std::push_heap keeps the largest on top, so the later of two merges is the smaller.
constexpr auto kComesLater = [](const auto& a, const auto& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
};

}  // namespace

void BytePairs::propose(int32_t position, Scratch& scratch) const {
  const auto& left = scratch.symbols[static_cast<size_t>(position)];
  if (left.next == kNone) return;
  const Slot& slot = find(left.id, scratch.symbols[static_cast<size_t>(left.next)].id);
  if (slot.result == kNone) return;
  scratch.candidates.push_back({slot.rank, position, slot.result});
  std::push_heap(scratch.candidates.begin(), scratch.candidates.end(), kComesLater);
}

void BytePairs::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  TROUPE_CHECK(word.size() <= INT32_MAX, "a word has too many bytes");
  if (word.empty()) return;
  const auto size = static_cast<int32_t>(word.size());
  auto& symbols = scratch.symbols;
  auto& candidates = scratch.candidates;
  symbols.resize(word.size());
  candidates.clear();
  for (int32_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(word[static_cast<size_t>(i)]);
    symbols[static_cast<size_t>(i)] = {byte_ids_[byte], i - 1, i + 1};
  }
  symbols.back().next = kNone;
  for (int32_t i = 0; i + 1 < size; ++i) propose(i, scratch);

  while (!candidates.empty()) {
    std::pop_heap(candidates.begin(), candidates.end(), kComesLater);
    const auto candidate = candidates.back();
    candidates.pop_back();
    auto& left = symbols[static_cast<size_t>(candidate.position)];
    if (left.id == kNone || left.next == kNone) continue;
    // A candidate whose sides have changed counts if they still make the same symbol, as in the
    // reference implementation.
    auto& right = symbols[static_cast<size_t>(left.next)];
    if (find(left.id, right.id).result != candidate.result) continue;
    left.id = candidate.result;
    left.next = right.next;
    right.id = kNone;
    if (left.next != kNone) symbols[static_cast<size_t>(left.next)].previous = candidate.position;
    if (left.previous != kNone) propose(left.previous, scratch);
    propose(candidate.position, scratch);
  }
  for (int32_t i = 0; i != kNone; i = symbols[static_cast<size_t>(i)].next) {
    ids.push_back(symbols[static_cast<size_t>(i)].id);
  }
}

}  // namespace troupe
