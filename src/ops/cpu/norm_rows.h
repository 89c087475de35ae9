// The rows that the norms of x, or of x + delta, walk: what rms_norm and layer_norm share.
#pragma once

#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {

// For each live row of input 0, x, calls normalize(row, element), where element(i) is the unrounded
// number to be normed: x[row, i], or x[row, i] + delta[row, i] when `delta` is not null. Then the
// sum is also written to `sums`, rounded. `sums` may be x or delta: a row is read before it is
// written.
template <class T, class Normalize>
inline void for_each_norm_row(const KernelArguments& args, const T* delta, T* sums,
                              const Normalize& normalize) {
  const T* x = args.in<T>(0);
  const int64_t n = args.input(0).shape[1];
  args.pool->parallel_ranges(
      args.input(0).rows(), row_grain(n), [=](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
          const T* a = x + row * n;
          if (delta == nullptr) {
            normalize(row, [=](int64_t i) { return widen(a[i]); });
            continue;
          }
          const T* b = delta + row * n;
          const auto element = [=](int64_t i) { return widen(a[i]) + widen(b[i]); };
          normalize(row, element);
          TROUPE_INDEPENDENT
          for (int64_t i = 0; i < n; ++i) sums[row * n + i] = T(element(i));
        }
      });
}

}  // namespace troupe
