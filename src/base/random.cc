#include "base/random.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace troupe {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53U;
constexpr uint32_t kMultiplier1 = 0xCD9E8D57U;
constexpr uint32_t kWeyl0 = 0x9E3779B9U;
constexpr uint32_t kWeyl1 = 0xBB67AE85U;
constexpr int kRounds = 10;

// Positions that are computed side by side: two vectors of eight.
constexpr int kLanes = 16;
using VectorWords [[gnu::vector_size(64)]] = uint64_t;

// The rounds, on one position or on those of a vector. Words are the low halves of 64 bits; what
// the high halves hold does not matter.
template <class Word>
void philox(uint64_t seed, Word& c0, Word& c1, Word& c2, Word& c3) {
  constexpr uint64_t kLow = 0xffffffffU;
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const Word product0 = (c0 & kLow) * kMultiplier0;
    const Word product1 = (c2 & kLow) * kMultiplier1;
    c0 = (product1 >> 32) ^ c1 ^ key0;
    c1 = product1;
    c2 = (product0 >> 32) ^ c3 ^ key1;
    c3 = product0;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

// The words of kLanes positions from `index` on: lane i holds those of the i-th.
struct Words {
  uint32_t c0[kLanes];
  uint32_t c1[kLanes];
  uint32_t c2[kLanes];
  uint32_t c3[kLanes];
};

Words words_from(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index) {
  constexpr int kVector = sizeof(VectorWords) / sizeof(uint64_t);
  Words words;
  for (int first = 0; first < kLanes; first += kVector) {
    VectorWords c0 = {0, 1, 2, 3, 4, 5, 6, 7};
    c0 += index + static_cast<uint64_t>(first);
    VectorWords c1 = c0 >> 32;
    VectorWords c2 = VectorWords{} + uint64_t{substream};
    VectorWords c3 = VectorWords{} + static_cast<uint64_t>(stream);
    philox(seed, c0, c1, c2, c3);
    for (int i = 0; i < kVector; ++i) {
      words.c0[first + i] = static_cast<uint32_t>(c0[i]);
      words.c1[first + i] = static_cast<uint32_t>(c1[i]);
      words.c2[first + i] = static_cast<uint32_t>(c2[i]);
      words.c3[first + i] = static_cast<uint32_t>(c3[i]);
    }
  }
  return words;
}

// An integer below 2^52, exactly: as the last bits of the mantissa of 2^52 + x. (Processors without
// AVX-512 have no vector instruction for it.)
inline double to_double(uint64_t x) {
  constexpr uint64_t kTwoTo52 = 0x4330000000000000U;
  return std::bit_cast<double>(kTwoTo52 | x) - 0x1.0p52;
}

// The first 53 bits of the two words, over 2^53.
inline double to_unit_interval(uint32_t high, uint32_t low) {
  return std::fma(to_double(low >> 11), 0x1.0p-53, to_double(high) * 0x1.0p-32);
}

// The two functions below are written for vector registers: no branches, no tables. Sums of
// products are explicit FMAs, so every compiler computes the same bits, alone and in vectors.

// The natural logarithm of x in [2^-53, 1] within 3 ulp.
//
// x = 2^n m with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(s) with s = (m - 1) / (m + 1). Of
// 2 artanh(s) / s = 2 + z r(z), z = s^2, r is interpolated at seven Chebyshev nodes of the z that
// occur (relative error 5e-18).
inline double log_of_unit(double x) {
  constexpr uint64_t kRootOfHalf = 0x3fe6a09e667f3bcdU;  // as bits, as kOne
  constexpr uint64_t kOne = 0x3ff0000000000000U;
  constexpr uint64_t kMantissa = 0x000fffffffffffffU;
  const uint64_t shifted = std::bit_cast<uint64_t>(x) + (kOne - kRootOfHalf);
  const double n = to_double(shifted >> 52) - 1023.0;
  const double f = std::bit_cast<double>((shifted & kMantissa) + kRootOfHalf) - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double r = 0.14616484198366603;
  r = std::fma(r, z, 0.1533171880828007);
  r = std::fma(r, z, 0.18182889209266595);
  r = std::fma(r, z, 0.22222211133642084);
  r = std::fma(r, z, 0.2857142862598255);
  r = std::fma(r, z, 0.3999999999989949);
  r = std::fma(r, z, 0.666666666666667);
  const double log_of_m = std::fma(s * z, r, 2.0 * s);
  return std::fma(n, 0.69314718055994531, log_of_m);
}

// sin(pi/2 x) for x in [-1, 1] within 2 ulp: x (pi/2 + w q(w)), w = x^2, where q interpolates at
// eight Chebyshev nodes (relative error 1e-18).
inline double sine_of_right_angles(double x) {
  const double w = x * x;
  double q = 5.894274162895108e-12;
  q = std::fma(q, w, -6.685242204324938e-10);
  q = std::fma(q, w, 5.692149342223677e-08);
  q = std::fma(q, w, -3.5988431248215753e-06);
  q = std::fma(q, w, 0.00016044118475928187);
  q = std::fma(q, w, -0.00468175413531518);
  q = std::fma(q, w, 0.07969262624616688);
  q = std::fma(q, w, -0.6459640975062463);
  return x * std::fma(q, w, 1.5707963267948966);
}

// The Box-Muller transform of a position's words: sqrt(-2 ln u) cos(2 pi v) with u in (0, 1] and v
// in [0, 1). cos(2 pi v) is sin(pi/2 (|4 v - 2| - 1)), whose argument is exact.
inline double to_normal(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  const double u = 1.0 - to_unit_interval(c0, c1);
  const double v = to_unit_interval(c2, c3);
  return std::sqrt(-2.0 * log_of_unit(u)) *
         sine_of_right_angles(std::abs(std::fma(4.0, v, -2.0)) - 1.0);
}

}  // namespace

std::array<uint32_t, 4> random_words(uint64_t seed, RandomStream stream, uint32_t substream,
                                     uint64_t index) {
  uint64_t c0 = index;
  uint64_t c1 = index >> 32;
  uint64_t c2 = substream;
  auto c3 = static_cast<uint64_t>(stream);
  philox(seed, c0, c1, c2, c3);
  return {static_cast<uint32_t>(c0), static_cast<uint32_t>(c1), static_cast<uint32_t>(c2),
          static_cast<uint32_t>(c3)};
}

void fill_random_words(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t first_index,
                       int64_t count, uint32_t* words) {
  for (int64_t begin = 0; begin < count; begin += kLanes) {
    const Words drawn =
        words_from(seed, stream, substream, first_index + static_cast<uint64_t>(begin));
    const int64_t wanted = std::min<int64_t>(kLanes, count - begin);
    for (int64_t i = 0; i < wanted; ++i) {
      words[4 * (begin + i)] = drawn.c0[i];
      words[4 * (begin + i) + 1] = drawn.c1[i];
      words[4 * (begin + i) + 2] = drawn.c2[i];
      words[4 * (begin + i) + 3] = drawn.c3[i];
    }
  }
}

uint64_t random_step_seed(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t step) {
  const auto words = random_words(seed, stream, substream, step);
  return (static_cast<uint64_t>(words[0]) << 32) | words[1];
}

double random_uniform(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index) {
  const auto words = random_words(seed, stream, substream, index);
  return to_unit_interval(words[0], words[1]);
}

uint64_t random_below(uint64_t bound, uint64_t seed, RandomStream stream, uint32_t substream,
                      uint64_t index) {
  const auto words = random_words(seed, stream, substream, index);
  const uint64_t word = (static_cast<uint64_t>(words[0]) << 32) | words[1];
  return static_cast<uint64_t>((static_cast<unsigned __int128>(word) * bound) >> 64);
}

double random_normal(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index) {
  const auto words = random_words(seed, stream, substream, index);
  return to_normal(words[0], words[1], words[2], words[3]);
}

void fill_random_normals(uint64_t seed, RandomStream stream, uint32_t substream,
                         uint64_t first_index, int64_t count, double* values) {
  for (int64_t begin = 0; begin < count; begin += kLanes) {
    const Words drawn =
        words_from(seed, stream, substream, first_index + static_cast<uint64_t>(begin));
    double normals[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      normals[i] = to_normal(drawn.c0[i], drawn.c1[i], drawn.c2[i], drawn.c3[i]);
    }
    std::copy_n(normals, std::min<int64_t>(kLanes, count - begin), values + begin);
  }
}

}  // namespace troupe
