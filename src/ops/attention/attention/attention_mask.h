// Which keys a query of causal attention sees, by their positions in the sequence: what the costs
// and the kernels of all forms of attention share.
//
// A query sees its own position and those before it; with a window only the last `window` of these,
// and where a sequence holds several documents only those of its own document.
//
// Plain values and pure functions, also in CUDA kernels.
#pragma once

#include <cstdint>

namespace troupe {

// Positions [first, first + count) of a sequence.
struct AttentionBlock {
  int64_t first = 0;
  int64_t count = 0;
};

// Of consecutive queries. `starts` has the position at which the document of each begins, at or
// before the query itself; it never falls from one query to the next.
struct AttentionMask {
  int64_t window = 0;               // 0: none
  const int32_t* starts = nullptr;  // null: every sequence is one document
  int64_t first_query = 0;          // that starts[0] belongs to

  // Keys visible from query i: [first_key(i), i]. It never falls from one query to the next.
  constexpr int64_t first_key(int64_t i) const {
    const int64_t in_window = window == 0 || i < window ? 0 : i - window + 1;
    if (starts == nullptr) return in_window;
    const int64_t start = starts[i - first_query];
    return start > in_window ? start : in_window;
  }

  // Does any query of the block see any of the keys?
  constexpr bool any(const AttentionBlock& queries, const AttentionBlock& keys) const {
    return keys.first < queries.first + queries.count &&
           keys.first + keys.count > first_key(queries.first);
  }
};

// Pairs of query and visible key of a sequence: all that there can be, as if it was one document.
constexpr double most_visible_pairs(int64_t sequence, int64_t window) {
  const auto s = static_cast<double>(sequence);
  const double w = window == 0 || window > sequence ? s : static_cast<double>(window);
  return w * s - w * (w - 1) / 2;
}

}  // namespace troupe
