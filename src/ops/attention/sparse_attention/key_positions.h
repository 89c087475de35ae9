// Which keys a query of sparse attention has, and where their rows lie: what the kernels of sparse
// attention and of its indexer share.
//
// Queries are a rank's rows [batch][rows]. Keys are those of all ranks that share each sequence
// (program/row_origin.h), one rank's rows [batch][rows] after the other's. A query sees the
// positions from the beginning of its document, or of its sequence, up to its own; of these it has
// all, or those that the indexer chose for it: ascending positions, then -1 to the end of the row.
//
// Plain values and pure functions, also in CUDA kernels.
#pragma once

#include <cstdint>

#include "program/row_origin.h"

namespace troupe {

struct KeyRows {
  int32_t batch = 1;
  int32_t rows = 1;  // of a rank in each sequence
  int32_t ranks = 1;
  int32_t rank = 0;

  constexpr int64_t sequence() const { return int64_t{rows} * ranks; }
  constexpr int64_t queries() const { return int64_t{batch} * rows; }
  constexpr int64_t keys() const { return queries() * ranks; }

  // The row of the key at `position` of sequence `b`.
  constexpr int64_t key(int64_t b, int64_t position) const {
    if (ranks == 1) return b * rows + position;
    const int64_t chunk = rows / 2;
    const int64_t number = position / chunk;
    const bool is_first = number < ranks;
    const int64_t owner = is_first ? number : 2 * ranks - 1 - number;
    return (owner * batch + b) * rows + (is_first ? 0 : chunk) + position % chunk;
  }
  // The position of a query in its sequence, by its row.
  constexpr int64_t position(int64_t query) const { return position_of(rank, query % rows); }
  // The sequence and position of a key, by its row.
  constexpr int64_t key_sequence(int64_t key) const { return key % queries() / rows; }
  constexpr int64_t key_position(int64_t key) const {
    return position_of(key / queries(), key % rows);
  }

 private:
  constexpr int64_t position_of(int64_t owner, int64_t row) const {
    if (ranks == 1) return row;
    const int64_t chunk = rows / 2;
    return row < chunk ? owner * chunk + row : (2 * ranks - 2 - owner) * chunk + row;
  }
};

inline KeyRows key_rows(int32_t batch, int32_t rows, const SequenceChunks& chunks) {
  return {.batch = batch, .rows = rows, .ranks = chunks.ranks, .rank = chunks.rank};
}

// Ascending positions in a sequence.
struct KeyPositions {
  const int32_t* chosen = nullptr;  // null: consecutive ones
  int64_t first = 0;
  int64_t count = 0;

  constexpr int64_t operator[](int64_t i) const {
    return chosen != nullptr ? chosen[i] : first + i;
  }
};

// What a query sees. `starts`: null, or where the document of each query begins.
constexpr KeyPositions visible_positions(const KeyRows& rows, const int32_t* starts,
                                         int64_t query) {
  const int64_t first = starts == nullptr ? 0 : starts[query];
  return {nullptr, first, rows.position(query) + 1 - first};
}

// What was chosen for a query, of at most `most` positions.
constexpr KeyPositions chosen_positions(const int32_t* chosen, int64_t query, int64_t most) {
  const int32_t* row = chosen + query * most;
  int64_t count = 0;
  for (int64_t end = most; count < end;) {
    const int64_t middle = (count + end) / 2;
    if (row[middle] < 0) {
      end = middle;
    } else {
      count = middle + 1;
    }
  }
  return {row, 0, count};
}

// The number among `positions` of one of them; -1: it is none.
constexpr int64_t number_of(const KeyPositions& positions, int64_t position) {
  if (positions.chosen == nullptr) {
    const int64_t number = position - positions.first;
    return number >= 0 && number < positions.count ? number : -1;
  }
  int64_t begin = 0;
  for (int64_t end = positions.count; begin < end;) {
    const int64_t middle = (begin + end) / 2;
    if (positions.chosen[middle] < position) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin < positions.count && positions.chosen[begin] == position ? begin : -1;
}

// How many pairs of a query and a key a sequence has where each query keeps at most `most` keys, as
// if the sequence was one document.
constexpr double most_chosen_pairs(int64_t sequence, int64_t most) {
  const auto s = static_cast<double>(sequence);
  const double k = most < sequence ? static_cast<double>(most) : s;
  return k * s - k * (k - 1) / 2;
}

}  // namespace troupe
