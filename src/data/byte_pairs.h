// Byte-pair encoding of single words, from bytes upwards.
//
// A word begins as one symbol per byte. While there are neighbours that a merge joins, the merge of
// the lowest rank is done, leftmost first. Immutable; any number of threads, each with a Scratch of
// its own. Takes time n log n for a word of n bytes. Nothing here fails.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace troupe {

class BytePairs {
 public:
  struct Merge {
    int32_t left = 0;
    int32_t right = 0;
    int32_t result = 0;
  };
  // Working memory of one thread.
  class Scratch {
    friend class BytePairs;
    struct Symbol {
      int32_t id = 0;  // kNone: joined to a neighbour on the left
      int32_t previous = 0;
      int32_t next = 0;
    };
    struct Candidate {
      int32_t rank = 0;
      int32_t position = 0;  // of the left symbol
      int32_t result = 0;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> candidates;  // a heap, the next merge on top
  };

  // `merges` in the order of their ranks; of two with the same sides the later one counts.
  // Ids are not negative.
  BytePairs(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges);

  // Appends the ids of a word of at most 2^31 - 1 bytes.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  static constexpr int32_t kNone = -1;
  struct Slot {
    int32_t left = kNone;
    int32_t right = kNone;
    int32_t rank = 0;
    int32_t result = kNone;
  };

  size_t first_slot(int32_t left, int32_t right) const;
  // The slot of a pair, or a slot whose result is kNone.
  const Slot& find(int32_t left, int32_t right) const;
  void propose(int32_t position, Scratch& scratch) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<Slot> slots_;  // a hash table with open addressing
  int shift_ = 0;
};

}  // namespace troupe
