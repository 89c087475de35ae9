// Counting and ordering of slots by expert on the CPU: what count_experts, expert_capacity and
// route have in common. A slot is an element of the flat indices [T * k]; an index outside [0, E)
// belongs to no expert.
//
// Slots are cut into fixed chunks with one histogram of E counters each. So the work runs in
// parallel, the order of slots is kept, and the results are the same for any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/thread_pool.h"

namespace troupe {

inline constexpr int64_t kSlotChunk = 16384;

inline int64_t slot_chunks(int64_t slots) {
  return (slots + kSlotChunk - 1) / kSlotChunk;
}

// histogram[e] = how many of the `count` indices are e.
inline void count_slots(const int32_t* indices, int64_t count, int32_t experts,
                        int32_t* histogram) {
  std::fill_n(histogram, experts, 0);
  // As unsigned, -1 exceeds every expert's number.
  const auto limit = static_cast<uint32_t>(experts);
  for (int64_t slot = 0; slot < count; ++slot) {
    const auto expert = static_cast<uint32_t>(indices[slot]);
    if (expert < limit) ++histogram[expert];
  }
}

// Fills ranks[slot_chunks(slots) * E] with the number of slots that each expert has in earlier
// chunks, and loads[E] with the number of its slots in all.
inline void rank_slots(ThreadPool& pool, const int32_t* indices, int64_t slots, int32_t experts,
                       int32_t* ranks, int32_t* loads) {
  pool.parallel_ranges(slots, kSlotChunk, [=](int64_t begin, int64_t end, int) {
    count_slots(indices + begin, end - begin, experts, ranks + begin / kSlotChunk * experts);
  });
  const int64_t chunks = slot_chunks(slots);
  for (int32_t expert = 0; expert < experts; ++expert) {
    int32_t rank = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      int32_t& cell = ranks[chunk * experts + expert];
      const int32_t count = cell;
      cell = rank;
      rank += count;
    }
    loads[expert] = rank;
  }
}

// Calls place(slot, expert, rank) for every slot, in parallel: the slot is the expert's rank-th,
// counted from 0 in the order of slots; or expert and rank are -1. Uses up `ranks` as rank_slots
// left them.
template <class Place>
void place_slots(ThreadPool& pool, const int32_t* indices, int64_t slots, int32_t experts,
                 int32_t* ranks, const Place& place) {
  pool.parallel_ranges(slots, kSlotChunk, [=](int64_t begin, int64_t end, int) {
    int32_t* next = ranks + begin / kSlotChunk * experts;
    const auto limit = static_cast<uint32_t>(experts);
    for (int64_t slot = begin; slot < end; ++slot) {
      const int32_t expert = indices[slot];
      if (static_cast<uint32_t>(expert) < limit) {
        place(slot, expert, next[expert]++);
      } else {
        place(slot, -1, -1);
      }
    }
  });
}

}  // namespace troupe
