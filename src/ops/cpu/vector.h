// Building blocks of the CPU kernels: reductions and elementwise helpers over contiguous elements
// of T = double, float or bf16, computed in accumulation_t<T> (double, or float for float and
// bf16).
//
// Reductions add element i to lane i % 16 and then the lanes pairwise, so the result depends on the
// elements alone, never on the instruction set, the threads or the alignment; and the compiler can
// keep the lanes in vector registers without being allowed to reorder sums (-ffast-math is off).
// Elementwise loops are written so that they vectorise; exp_fast, sigmoid and normal_distribution
// have no branches.
//
// All functions write their output ranges only and may be called from any thread. Ranges of
// one call may be the same range; they may not overlap otherwise. n may be 0.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/dtype.h"

// Before a loop: its iterations are independent (operands are the same range or do not overlap), so
// the compiler need not check that before it vectorises. Clang's counterpart turns every loop that
// it cannot vectorise into a warning, so there the compiler checks.
#if defined(__clang__)
#define TROUPE_INDEPENDENT
#else
#define TROUPE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace troupe {

inline constexpr int64_t kVectorLanes = 16;

// Rows of a piece of work for the pool: some 32 k elements, and at least one row.
inline int64_t row_grain(int64_t row_elements) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, row_elements));
}

// The value in the type that it is computed with.
template <class T>
inline accumulation_t<T> widen(T value) {
  return static_cast<accumulation_t<T>>(value);
}

// out[i] = in[i], widened.
template <class T>
inline void load(const T* in, accumulation_t<T>* out, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) out[i] = widen(in[i]);
}

// out[i] = in[i], rounded to nearest even.
template <class T>
inline void store(const accumulation_t<T>* in, T* out, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) out[i] = T(in[i]);
}

// The sum over the fixed lanes (see the top) of term(0) ... term(n - 1), each of type A.
template <class A, class Term>
[[gnu::always_inline]] inline A lane_sum(int64_t n, const Term& term) {
  A lanes[kVectorLanes] = {};
  int64_t i = 0;
  for (; i + kVectorLanes <= n; i += kVectorLanes) {
    for (int64_t lane = 0; lane < kVectorLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int64_t lane = 0; i + lane < n; ++lane) lanes[lane] += term(i + lane);
  for (int64_t width = kVectorLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class T>
inline accumulation_t<T> sum(const T* x, int64_t n) {
  return lane_sum<accumulation_t<T>>(n, [=](int64_t i) { return widen(x[i]); });
}

// Sum of a[i] * b[i]; the two may differ in storage type but not in accumulation type.
template <class T, class U>
inline accumulation_t<T> dot(const T* a, const U* b, int64_t n) {
  static_assert(std::is_same_v<accumulation_t<T>, accumulation_t<U>>);
  return lane_sum<accumulation_t<T>>(n, [=](int64_t i) { return widen(a[i]) * widen(b[i]); });
}

template <class T>
inline accumulation_t<T> sum_of_squares(const T* x, int64_t n) {
  return dot(x, x, n);
}

// The largest element; -infinity when n is 0. NaN elements are passed over.
template <class T>
inline accumulation_t<T> max(const T* x, int64_t n) {
  using A = accumulation_t<T>;
  A lanes[kVectorLanes];
  for (A& lane : lanes) lane = -std::numeric_limits<A>::infinity();
  int64_t i = 0;
  for (; i + kVectorLanes <= n; i += kVectorLanes) {
#pragma GCC unroll 1  // unrolled first, gcc makes sixteen branches of it
    for (int64_t lane = 0; lane < kVectorLanes; ++lane) {
      const A value = widen(x[i + lane]);
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    }
  }
  for (int64_t lane = 0; i + lane < n; ++lane) {
    const A value = widen(x[i + lane]);
    lanes[lane] = value > lanes[lane] ? value : lanes[lane];
  }
  for (int64_t width = kVectorLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) {
      lanes[lane] = lanes[lane + width] > lanes[lane] ? lanes[lane + width] : lanes[lane];
    }
  }
  return lanes[0];
}

// y[i] += x[i]
template <class T>
inline void add_to(const T* x, accumulation_t<T>* y, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) y[i] += widen(x[i]);
}

// y[i] += a * x[i]
template <class T>
inline void axpy(accumulation_t<T> a, const T* x, accumulation_t<T>* y, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) y[i] += a * widen(x[i]);
}

// e^x within 1 ulp. Results below the smallest normal float are 0 (a denormal result would cost
// the processor a hundred cycles, and masked-out logits are common); large x gives infinity, NaN
// stays NaN.
//
// x = n ln 2 + r with |r| <= ln(2)/2; e^r = 1 + r + r^2 q(r), where q interpolates
// (e^r - 1 - r) / r^2 at the five Chebyshev nodes (error of e^r under 0.2 ulp); then n is added to
// the exponent bits.
inline float exp_fast(float x) {
  constexpr float kLargest = 88.72284F;      // the last x whose e^x is finite
  constexpr float kSmallest = -87.33654F;    // the last x whose e^x is a normal number
  constexpr float kRound = 12582912.0F;      // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLog2High = 0.693359375F;  // ten bits of ln 2: its product with n is exact
  constexpr float kLog2Low = -2.12194440e-4F;
  const float inside = x > kLargest ? kLargest : (x < kSmallest ? kSmallest : x);
  const float shifted = inside * 1.44269504F + kRound;
  const float n = shifted - kRound;
  const float r = (inside - n * kLog2High) - n * kLog2Low;
  const float q =
      (((1.39262135e-3F * r + 8.36320297e-3F) * r + 4.16665544e-2F) * r + 1.66665768e-1F) * r +
      0.5F;
  const float power = 1.0F + (r + r * r * q);
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound))
                            << 23;
  const float value = std::bit_cast<float>(std::bit_cast<uint32_t>(power) + exponent);
  const float bounded = x < kSmallest ? 0.0F : value;
  const float limited = x > kLargest ? std::numeric_limits<float>::infinity() : bounded;
  return x == x ? limited : x;
}
inline double exp_fast(double x) {
  return std::exp(x);
}

// 1 / (1 + e^-x). For float within 3 ulp; 0 for x under about -88.
template <class A>
inline A sigmoid(A x) {
  return A(1) / (A(1) + exp_fast(-x));
}

// The standard normal distribution at x: its density e^(-x^2/2) / sqrt(2 pi) and Phi(x), the
// probability of a smaller number, which is (1 + erf(x / sqrt 2)) / 2.
template <class A>
struct NormalDistribution {
  A density;
  A cumulative;
};

// For float, both are within 2e-7 of the exact value, and within (4 + x^2 / 2) 1e-7 of it
// relatively while it is above 1e-37; NaN stays NaN.
//
// Phi(-x) / density(x), the Mills ratio, is smooth and falls like 1 / x: for x >= 0 it is t q(t)
// with t = 1 / (1 + 0.35 x) and q interpolating at nine Chebyshev nodes of the t of 0 <= x <= 13.2
// (relative error 4e-8), beyond which the density is 0 in float.
inline NormalDistribution<float> normal_distribution(float x) {
  const float density = 0.398942280F * exp_fast(-0.5F * x * x);
  const float t = 1.0F / (1.0F + 0.35F * std::abs(x));
  const float low =
      (((-7.40926027e-2F * t + 3.65930783e-1F) * t - 6.51390859e-1F) * t + 4.10796710e-1F) * t -
      6.59414440e-2F;
  const float q =
      (((low * t + 2.67785554e-1F) * t + 2.99563827e-1F) * t + 3.50688988e-1F) * t + 3.49973142e-1F;
  const float tail = density * (t * q);
  return {density, x > 0.0F ? 1.0F - tail : tail};
}
inline NormalDistribution<double> normal_distribution(double x) {
  return {0.398942280401432678 * std::exp(-0.5 * x * x),
          0.5 * std::erfc(x * -0.707106781186547524)};
}

}  // namespace troupe
