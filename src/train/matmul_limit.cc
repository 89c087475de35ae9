#include "train/matmul_limit.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "ops/cpu/gemm.h"
#include "runtime/device_limits.h"

namespace troupe {
namespace {

constexpr int64_t kSize = 768;    // three matrices of it fill, but do not overflow, a large cache
constexpr double kSeconds = 0.1;  // the best repetition counts: other work comes and goes

template <class T>
double measure(ThreadPool& pool) {
  using Clock = std::chrono::steady_clock;
  const auto elements = static_cast<size_t>(kSize * kSize);
  std::vector<T> a(elements);
  std::vector<T> b(elements);
  // Not zeros: some processors multiply zeros faster.
  for (size_t i = 0; i < elements; ++i) {
    a[i] = T(0.5) + static_cast<T>(i % 17) * T(0.03);
    b[i] = T(0.25) - static_cast<T>(i % 13) * T(0.05);
  }
  std::vector<std::vector<T>> c(static_cast<size_t>(pool.threads()), std::vector<T>(elements));
  const auto seconds_since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const auto product = [&] {
    const auto start = Clock::now();
    pool.parallel_for(pool.threads(), [&](int64_t chunk, int) {
      gemm_tile<T>(false, true, kSize, kSize, kSize, T(1), a.data(), kSize, b.data(), kSize, T(0),
                   c[static_cast<size_t>(chunk)].data(), kSize);
    });
    return 2.0 * kSize * kSize * kSize * pool.threads() / seconds_since(start);
  };
  product();  // warms up
  const auto begin = Clock::now();
  double best = 0;
  do {
    best = std::max(best, product());
  } while (seconds_since(begin) < kSeconds);
  return best;
}

}  // namespace

double measure_matmul_limit(DType compute_dtype, ThreadPool& pool, Device device) {
  if (device == Device::cuda) return measure_device_matmul_limit(compute_dtype);
  return compute_dtype == DType::f64 ? measure<double>(pool) : measure<float>(pool);
}

}  // namespace troupe
