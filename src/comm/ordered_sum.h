// Sums over ranks, in the one order that gives every rank and every kind of process group the same
// bits: element by element, ascending ranks, in the accumulation dtype, rounded once.
//
// Pure functions; any thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/dtype.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "program/shard.h"

namespace troupe {

// Elements that are summed over all ranks before the next: the sums stay in the first-level cache.
inline constexpr int64_t kSumBlock = 1024;
inline constexpr int64_t kSumGrain = 32 * kSumBlock;

// The sum over sources 0, 1, ... of their element i, for i of `range`, in Sum's arithmetic; it goes
// to every result, which may be a source. `source(k)` and `result(k)` are where they lie.
template <class T, class Sum, class Source, class Result>
void sum_elements(size_t sources, const Source& source, size_t results, const Result& result,
                  IndexRange range, ThreadPool& pool) {
  pool.parallel_ranges(range.end - range.begin, kSumGrain, [&](int64_t first, int64_t last, int) {
    std::array<Sum, kSumBlock> sum;
    for (int64_t at = range.begin + first; at < range.begin + last; at += kSumBlock) {
      const int64_t count = std::min(kSumBlock, range.begin + last - at);
      for (size_t k = 0; k < sources; ++k) {
        const T* terms = source(k) + at;
        for (int64_t i = 0; i < count; ++i) {
          const auto term = static_cast<Sum>(terms[i]);
          Sum& element = sum[static_cast<size_t>(i)];
          element = k == 0 ? term : element + term;
        }
      }
      for (size_t k = 0; k < results; ++k) {
        T* target = result(k) + at;
        for (int64_t i = 0; i < count; ++i) {
          target[i] = static_cast<T>(sum[static_cast<size_t>(i)]);
        }
      }
    }
  });
}

// body.template operator()<T, Sum>() with the types of elements and sums of `dtype`.
template <class Body>
void with_sum_types(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f64:
      return body.template operator()<double, double>();
    case DType::f32:
      return body.template operator()<float, float>();
    case DType::bf16:
      return body.template operator()<bf16, float>();
    case DType::f16:
      return body.template operator()<f16, float>();
    case DType::i32:
      return body.template operator()<int32_t, int32_t>();
    default:
      TROUPE_CHECK(false, "no sum over ranks of this dtype");
  }
}

// `running` = the sum of counts(0) to counts(place), `total` = of all `ranks`.
template <class Counts>
void sum_counts(int ranks, int place, size_t elements, const Counts& counts, int32_t* running,
                int32_t* total) {
  std::fill_n(total, elements, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    const int32_t* own = counts(rank);
    for (size_t i = 0; i < elements; ++i) total[i] += own[i];
    if (rank == place) std::copy_n(total, elements, running);
  }
}

}  // namespace troupe
