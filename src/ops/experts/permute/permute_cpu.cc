#include <algorithm>
#include <cstring>

#include "ops/experts/permute/permute.h"

namespace troupe {
namespace {

// Elements of x per chunk.
constexpr int64_t kPermuteChunkElements = 16384;

// Rows per chunk of the search for filler rows, at least: most plans have few or none.
constexpr int64_t kPermuteSearchRows = 512;

// Goes through the tokens and scatters, instead of through the rows and gathers: each vector is
// then read from memory once and copied k times while it is in the cache. The plan gives each live
// row to one slot at most, so chunks of tokens write disjoint rows, and every one but the fillers.
template <class T>
struct PermuteKernel {
  static void run(const KernelArguments& args) {
    const int64_t tokens = args.input(0).shape[0];
    const int64_t hidden = args.input(0).shape[1];
    const int64_t top_k = args.input(2).shape[1];
    const T* x = args.in<T>(0);
    const auto* row_slot = args.in<int32_t>(1);
    const auto* slot_row = args.in<int32_t>(2);
    T* y = args.out<T>(0);
    const int64_t grain = std::max<int64_t>(1, kPermuteChunkElements / (hidden * top_k));
    args.pool->parallel_ranges(tokens, grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
          if (slot_row[slot] < 0) continue;
          std::memcpy(y + slot_row[slot] * hidden, x + token * hidden,
                      static_cast<size_t>(hidden) * sizeof(T));
        }
      }
    });
    const int64_t search_grain = std::max(kPermuteSearchRows, kPermuteChunkElements / hidden);
    args.pool->parallel_ranges(args.input(1).rows(), search_grain,
                               [=](int64_t begin, int64_t end, int) {
                                 for (int64_t row = begin; row < end; ++row) {
                                   if (row_slot[row] >= 0) continue;
                                   std::fill_n(y + row * hidden, hidden, T(accumulation_t<T>(0)));
                                 }
                               });
  }
};

}  // namespace

CpuKernel permute_cpu_kernel(DType dtype) {
  return select_float_kernel<PermuteKernel>(dtype);
}

}  // namespace troupe
