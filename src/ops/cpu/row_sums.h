// Sums over the rows of a tensor, as gradients of gains and biases are, on all threads of a pool.
// The rows are cut into pieces that are summed apart and then added in order. Both functions depend
// on the sizes alone, so the bits do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/thread_pool.h"
#include "ops/cpu/vector.h"

namespace troupe {

// How a sum over `rows` rows is cut: at least some 32 k elements in a piece and at most 32 pieces.
struct RowPieces {
  int64_t rows = 0;  // of one piece; the last may have fewer
  int64_t count = 0;
};
inline RowPieces row_pieces(int64_t rows, int64_t row_elements) {
  const int64_t piece = std::max(row_grain(row_elements), (rows + 31) / 32);
  return {.rows = piece, .count = (rows + piece - 1) / piece};
}

// Sums add_row(row, partial) over the rows below `live`, where `partial` (n elements) collects what
// the rows of one piece add, and writes the sum to `out` or adds it to what is there. `workspace`
// holds pieces.count * n elements.
template <class A, class AddRow>
inline void sum_rows(ThreadPool& pool, const RowPieces& pieces, int64_t live, int64_t n,
                     A* workspace, bool accumulate, A* out, const AddRow& add_row) {
  pool.parallel_for(pieces.count, [&](int64_t piece, int) {
    A* partial = workspace + piece * n;
    std::fill_n(partial, n, A(0));
    const int64_t end = std::min(live, (piece + 1) * pieces.rows);
    for (int64_t row = piece * pieces.rows; row < end; ++row) add_row(row, partial);
  });
  if (!accumulate) std::fill_n(out, n, A(0));
  for (int64_t piece = 0; piece < pieces.count; ++piece) add_to(workspace + piece * n, out, n);
}

}  // namespace troupe
