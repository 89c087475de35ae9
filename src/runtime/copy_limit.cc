#include "runtime/copy_limit.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

namespace troupe {
namespace {

constexpr int64_t kElements = int64_t{1} << 26;

void copy_by_library(const float* source, float* target, int64_t count) {
  std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
}

// The factor keeps the compiler from making this a call of memcpy.
void copy_by_loop(const float* source, float* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = 0.5F * source[i];
}

}  // namespace

double measure_copy_limit(ThreadPool& pool) {
  std::vector<float> source(kElements, 1);
  std::vector<float> target(kElements);
  double best = 0;
  const int64_t share = (kElements + pool.threads() - 1) / pool.threads();
  for (const int64_t grain : {share, int64_t{1} << 16}) {
    for (const auto copy : {copy_by_library, copy_by_loop}) {
      for (int run = 0; run < 4; ++run) {
        const auto start = std::chrono::steady_clock::now();
        pool.parallel_ranges(kElements, grain, [&](int64_t begin, int64_t end, int) {
          copy(source.data() + begin, target.data() + begin, end - begin);
        });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, 2.0 * sizeof(float) * kElements / seconds.count());
      }
    }
  }
  return best;
}

}  // namespace troupe
