#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/experts/combine/combine.h"

namespace troupe {
namespace {

// Elements of `rows` per chunk.
constexpr int64_t kCombineChunkElements = 16384;
// Columns whose sums are kept in the first-level cache at a time.
constexpr int64_t kCombineBlockColumns = 1024;

template <class T>
struct CombineKernel {
  using Sum = accumulation_t<T>;

  // The rows of one token, ascending; returns how many there are. Insertion sort: k is small.
  static int64_t sorted_rows(const int32_t* slot_row, int64_t top_k, int32_t* sorted) {
    int64_t count = 0;
    for (int64_t slot = 0; slot < top_k; ++slot) {
      const int32_t row = slot_row[slot];
      if (row < 0) continue;
      int64_t place = count++;
      for (; place > 0 && sorted[place - 1] > row; --place) sorted[place] = sorted[place - 1];
      sorted[place] = row;
    }
    return count;
  }

  static void sum_block(const T* rows, int64_t stride, const int32_t* sorted, int64_t count,
                        int64_t columns, T* y) {
    alignas(64) Sum sums[kCombineBlockColumns];
    load(rows + sorted[0] * stride, sums, columns);
    int64_t next = 1;
    for (; next + 2 <= count; next += 2) {
      const T* a = rows + sorted[next] * stride;
      const T* b = rows + sorted[next + 1] * stride;
      TROUPE_INDEPENDENT
      for (int64_t i = 0; i < columns; ++i) sums[i] = (sums[i] + widen(a[i])) + widen(b[i]);
    }
    if (next < count) add_to(rows + sorted[next] * stride, sums, columns);
    store(sums, y, columns);
  }

  static void run(const KernelArguments& args) {
    const int64_t tokens = args.input(2).shape[0];
    const int64_t top_k = args.input(2).shape[1];
    const int64_t hidden = args.input(0).shape[1];
    const T* rows = args.in<T>(0);
    const auto* slot_row = args.in<int32_t>(2);
    T* y = args.out<T>(0);
    const int64_t grain = std::max<int64_t>(1, kCombineChunkElements / (hidden * top_k));
    args.pool->parallel_ranges(tokens, grain, [&](int64_t begin, int64_t end, int worker) {
      auto* sorted = args.thread_scratch<int32_t>(worker);
      for (int64_t token = begin; token < end; ++token) {
        const int64_t count = sorted_rows(slot_row + token * top_k, top_k, sorted);
        if (count == 0) {
          std::fill_n(y + token * hidden, hidden, T(Sum(0)));
          continue;
        }
        for (int64_t column = 0; column < hidden; column += kCombineBlockColumns) {
          sum_block(rows + column, hidden, sorted, count,
                    std::min(kCombineBlockColumns, hidden - column), y + token * hidden + column);
        }
      }
    });
  }
};

}  // namespace

CpuKernel combine_cpu_kernel(DType dtype) {
  return select_float_kernel<CombineKernel>(dtype);
}

}  // namespace troupe
