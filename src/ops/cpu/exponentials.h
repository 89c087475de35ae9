// Exponentials of differences from a maximum, as softmax takes them, of T = double, float, bf16 or
// f16, computed in accumulation_t<T>: in double by the C library, in float sixteen at a time in
// vector registers as wide as the target has them (the compiler by itself prefers registers of half
// the width).
//
// Results depend on the elements and their order alone, as those of ops/cpu/vector.h. All functions
// write their output ranges only and may be called from any thread. n may be 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ops/cpu/vector.h"

namespace troupe {

// Sixteen numbers in vector registers. They are passed by reference: by value, how depends on the
// target's registers.
using VectorFloats [[gnu::vector_size(64)]] = float;
using VectorWords [[gnu::vector_size(64)]] = uint32_t;
using VectorHalves [[gnu::vector_size(32)]] = uint16_t;

inline void load_vector(const float* from, VectorFloats& to) {
  std::memcpy(&to, from, sizeof to);
}
inline void load_vector(const bf16* from, VectorFloats& to) {
  static_assert(sizeof(bf16) == sizeof(uint16_t));
  VectorHalves halves;
  std::memcpy(&halves, from, sizeof halves);
  to = reinterpret_cast<VectorFloats>(__builtin_convertvector(halves, VectorWords) << 16);
}
inline void load_vector(const f16* from, VectorFloats& to) {
  for (int lane = 0; lane < kVectorLanes; ++lane) to[lane] = from[lane];
}

inline void store_vector(const VectorFloats& from, float* to) {
  std::memcpy(to, &from, sizeof from);
}
// Rounded as bf16's constructor does.
inline void store_vector(const VectorFloats& from, bf16* to) {
  const auto words = reinterpret_cast<VectorWords>(from);
  const VectorWords quiet = words >> 16 | 0x0040U;
  const VectorWords rounded = (words + 0x7fffU + (words >> 16 & 1U)) >> 16;
  const VectorWords bits = (words & 0x7fffffffU) > 0x7f800000U ? quiet : rounded;
  const VectorHalves halves = __builtin_convertvector(bits, VectorHalves);
  std::memcpy(static_cast<void*>(to), &halves, sizeof halves);
}
inline void store_vector(const VectorFloats& from, f16* to) {
  for (int lane = 0; lane < kVectorLanes; ++lane) to[lane] = f16(from[lane]);
}

// x = e^x for every x <= 88, within 1.2 ulp where the result is a normal number, and 0 where it is
// smaller; NaN stays NaN.
//
// The method is that of exp_fast(); 2^n is made of the last bits of n + 127 + 1.5 * 2^23.
inline void exp_vector(VectorFloats& x) {
  constexpr float kRound = 12582912.0F + 127.0F;
  const VectorFloats shifted = x * 1.44269504F + kRound;
  const VectorFloats n = shifted - kRound;
  const VectorFloats r = (x - n * 0.693359375F) - n * -2.12194440e-4F;
  VectorFloats power = r * 1.39262135e-3F + 8.36320297e-3F;
  power = power * r + 4.16665544e-2F;
  power = power * r + 1.66665768e-1F;
  power = power * r + 0.5F;
  power = power * r + 1.0F;
  power = power * r + 1.0F;
  const auto scale = reinterpret_cast<VectorFloats>(reinterpret_cast<VectorWords>(shifted) << 23);
  x = x < -87.33654F ? VectorFloats{} : power * scale;
}

// How far before its use a line of memory is asked for, and the elements of a line.
inline constexpr int64_t kPrefetchLines = 32;
template <class T>
inline constexpr int64_t kLineElements = static_cast<int64_t>(64 / sizeof(T));

// y[i] = factor e^(x[i] - shift), for differences of at most 88. T is float or bf16.
template <class T>
void scaled_exponentials(const T* x, int64_t n, float shift, float factor, T* y) {
  const auto compute = [=](const T* from, T* to) {
    VectorFloats values;
    load_vector(from, values);
    values -= shift;
    exp_vector(values);
    values *= factor;
    store_vector(values, to);
  };
  int64_t i = 0;
  for (; i + kVectorLanes <= n; i += kVectorLanes) {
    __builtin_prefetch(x + i + kPrefetchLines * kLineElements<T>);
    compute(x + i, y + i);
  }
  T rest[kVectorLanes] = {};
  std::copy(x + i, x + n, rest);
  compute(rest, rest);
  std::copy(rest, rest + (n - i), y + i);
}
inline void scaled_exponentials(const double* x, int64_t n, double shift, double factor,
                                double* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = factor * std::exp(x[i] - shift);
}

// The largest of some elements and the sum of e^(x - largest) over them. Where all are -infinity
// (or there are none) so is the largest, and the sum is 0. The maximum passes over NaN, the sum
// does not.
template <class A>
struct ExponentialSum {
  A largest;
  A total;
};

inline ExponentialSum<double> exponential_sum(const double* x, int64_t n) {
  const double largest = max(x, n);
  if (largest == -std::numeric_limits<double>::infinity()) return {largest, 0};
  return {largest, lane_sum<double>(n, [=](int64_t i) { return std::exp(x[i] - largest); })};
}

// T is float or bf16. One pass over memory: while a block's exponentials are summed up, the maximum
// of the next block is taken and the block after that is on its way from memory. Where the maximum
// grows, what was summed is scaled.
template <class T>
ExponentialSum<float> exponential_sum(const T* x, int64_t n) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  constexpr int64_t kVectors = 4;  // as many sums side by side
  constexpr int64_t kStep = kVectors * kVectorLanes;
  constexpr int64_t kBlock = 16 * kStep;
  constexpr int64_t kAhead = kPrefetchLines * kLineElements<T>;
  VectorFloats largest[kVectors];
  VectorFloats sums[kVectors];
  float rest[kStep];  // what is left after the last whole step
  const int64_t whole = n - n % kStep;
  load(x + whole, rest, n - whole);
  std::fill(rest + (n - whole), rest + kStep, kLowest);
  for (int64_t v = 0; v < kVectors; ++v) {
    load_vector(rest + v * kVectorLanes, largest[v]);
    sums[v] = VectorFloats{};
  }

  const auto raise_largest = [&](const T* step) {
    for (int64_t v = 0; v < kVectors; ++v) {
      VectorFloats values;
      load_vector(step + v * kVectorLanes, values);
      largest[v] = values > largest[v] ? values : largest[v];
    }
    for (int64_t i = 0; i < kStep; i += kLineElements<T>) __builtin_prefetch(step + i + kAhead);
  };
  float shift = kLowest;
  const auto raise_shift = [&] {
    VectorFloats lanes = VectorFloats{} + kLowest;
    for (const VectorFloats& v : largest) lanes = v > lanes ? v : lanes;
    const float now = max(reinterpret_cast<const float*>(&lanes), kVectorLanes);
    if (now == shift) return;
    const float scale = exp_fast(shift - now);
    for (VectorFloats& v : sums) v *= scale;
    shift = now;
  };
  const auto add_step = [&](const auto* step, float from) {
    for (int64_t v = 0; v < kVectors; ++v) {
      VectorFloats values;
      load_vector(step + v * kVectorLanes, values);
      values -= from;
      exp_vector(values);
      sums[v] += values;
    }
  };

  for (int64_t i = 0; i < std::min(kBlock, whole); i += kStep) raise_largest(x + i);
  for (int64_t begin = 0; begin < whole; begin += kBlock) {
    raise_shift();
    const float from = shift == kLowest ? 0 : shift;
    const int64_t end = std::min(begin + kBlock, whole);
    const int64_t next_end = std::min(end + kBlock, whole);
    int64_t i = begin;
    for (; i + kBlock < next_end; i += kStep) {
      raise_largest(x + i + kBlock);
      add_step(x + i, from);
    }
    for (; i < end; i += kStep) add_step(x + i, from);
  }
  raise_shift();
  if (shift == kLowest) return {kLowest, 0};
  add_step(rest, shift);
  for (int64_t v = 1; v < kVectors; ++v) sums[0] += sums[v];
  return {shift, sum(reinterpret_cast<const float*>(sums), kVectorLanes)};
}

}  // namespace troupe
