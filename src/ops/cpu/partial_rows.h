// The sum of the partial rows that the ranks of a group return for each token: what return_rows and
// push_rows_back have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/thread_pool.h"
#include "ops/cpu/vector.h"

namespace troupe {

// out[t] = sum over ranks r, in ascending order, of row_of(r, slots[t * ranks + r]) where that slot
// is not -1, in the accumulation type, rounded once. A rank without a row adds +0, as it does when
// all ranks' rows are summed: a sum that lacks a term is never -0.
template <class T, class RowOf>
void sum_partial_rows(ThreadPool& pool, const int32_t* slots, int64_t tokens, int32_t ranks,
                      int64_t width, T* out, const RowOf& row_of) {
  using Sum = accumulation_t<T>;
  constexpr int64_t kBlockColumns = 1024;
  pool.parallel_ranges(tokens, row_grain(width), [&](int64_t begin, int64_t end, int) {
    alignas(64) Sum sums[kBlockColumns];
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t column = 0; column < width; column += kBlockColumns) {
        const int64_t columns = std::min(kBlockColumns, width - column);
        int32_t terms = 0;
        for (int32_t rank = 0; rank < ranks; ++rank) {
          const int32_t slot = slots[token * ranks + rank];
          if (slot < 0) continue;
          const T* row = row_of(rank, slot) + column;
          if (terms++ == 0) {
            load(row, sums, columns);
          } else {
            add_to(row, sums, columns);
          }
        }
        if (terms == 0) std::fill_n(sums, columns, Sum(0));
        if (terms < ranks) {
          for (int64_t i = 0; i < columns; ++i) sums[i] += Sum(0);
        }
        store(sums, out + token * width + column, columns);
      }
    }
  });
}

}  // namespace troupe
