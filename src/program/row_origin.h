// Where the rows that a rank has lie in the whole micro-batch: what positions and random numbers of
// an element follow, so that they are the same in every layout.
//
// A micro-batch is [batch][sequence] rows. The ranks of a cp group each have two chunks of every
// sequence, one from either end, for equal work in causal attention (docs/layouts.md, "Sequences"):
// of 2 cp equal chunks rank r has chunk r and then chunk 2 cp - 1 - r. Tensor parallelism may cut
// the rows that remain in equal consecutive blocks. Plain values; pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace troupe {

struct SequenceChunks {
  int32_t ranks = 1;  // of cp; 1: the whole sequence in its order
  int32_t rank = 0;

  bool operator==(const SequenceChunks&) const = default;

  // The position in its sequence of this rank's row `row` of `rows` in each sequence. `rows` is
  // even when there are several ranks.
  constexpr int64_t position(int64_t row, int64_t rows) const {
    if (ranks == 1) return row;
    const int64_t chunk = rows / 2;
    return row < chunk ? rank * chunk + row : (2 * ranks - 2 - rank) * chunk + row;
  }
  // Where the chunk of a row begins, and, of the 2 cp chunks, which rank has one.
  constexpr int64_t chunk_begin(int64_t row, int64_t rows) const {
    return ranks == 1 ? 0 : position(row, rows) - row % (rows / 2);
  }
  constexpr int64_t owner(int64_t chunk) const { return std::min(chunk, 2 * ranks - 1 - chunk); }
};

struct RowOrigin {
  int32_t first_row = 0;  // of the tensor, among the cp rank's rows of the micro-batch
  int32_t sequence = 0;   // rows of this cp rank in each sequence; 0: as if there was one cp rank
  SequenceChunks chunks = {};

  // The number in the whole micro-batch of row `row` of the tensor.
  int64_t whole_row(int64_t row) const {
    const int64_t own = first_row + row;
    if (chunks.ranks == 1) return own;
    return own / sequence * sequence * chunks.ranks + chunks.position(own % sequence, sequence);
  }

  // From row `row` on, how many rows follow each other in the whole micro-batch, too.
  int64_t run(int64_t row) const {
    if (chunks.ranks == 1) return std::numeric_limits<int64_t>::max();
    const int64_t chunk = sequence / 2;
    return chunk - (first_row + row) % chunk;
  }

  // For elements [begin, end) of a tensor with `width` elements in a row: calls
  // visit(first, last, whole) for pieces [first, last) of them, in order, of which the first one is
  // element `whole` of the tensor of the whole micro-batch and the others follow it.
  template <class Visit>
  void for_each_run(int64_t width, int64_t begin, int64_t end, const Visit& visit) const {
    for (int64_t first = begin; first < end;) {
      const int64_t row = first / width;
      const int64_t rows = run(row);
      const int64_t left = end - row * width;
      const int64_t last = rows > left / width ? end : std::min(end, (row + rows) * width);
      visit(first, last, whole_row(row) * width + first % width);
      first = last;
    }
  }
};

// " first_row=4 chunks=1/2", for printing attributes; empty where there is nothing to say.
std::string text_of(const RowOrigin& origin);

}  // namespace troupe
