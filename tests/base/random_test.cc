// Random numbers: the published test vectors of Philox4x32-10, and the distributions made of it.
#include "base/random.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <gtest/gtest.h>
#include <set>
#include <vector>

namespace troupe {
namespace {

using Words = std::array<uint32_t, 4>;

// Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds). The counter's words are the
// index (low, high), the substream and the stream; the key's are the seed (low, high).
TEST(RandomWords, KnownAnswers) {
  EXPECT_EQ(random_words(0, static_cast<RandomStream>(0), 0, 0),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(
      random_words(~uint64_t{0}, static_cast<RandomStream>(0xffffffff), 0xffffffff, ~uint64_t{0}),
      (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(random_words(0x299f31d0a4093822U, static_cast<RandomStream>(0x03707344), 0x13198a2e,
                         0x85a308d3243f6a88U),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The numbers of a stream are part of what a seed means.
TEST(RandomWords, StreamsKeepTheirNumbers) {
  EXPECT_EQ(static_cast<uint32_t>(RandomStream::parameter), 1U);
  EXPECT_EQ(static_cast<uint32_t>(RandomStream::sampling), 3U);
  EXPECT_EQ(static_cast<uint32_t>(RandomStream::router_noise), 4U);
  EXPECT_EQ(static_cast<uint32_t>(RandomStream::dropout), 5U);
  EXPECT_EQ(static_cast<uint32_t>(RandomStream::test), 6U);
  EXPECT_EQ(static_cast<uint32_t>(RandomStream::random_logits), 7U);
}

TEST(RandomWords, EveryArgumentMatters) {
  std::set<Words> seen;
  for (const uint64_t seed : {uint64_t{1}, uint64_t{2}, uint64_t{1} << 32}) {
    for (const RandomStream stream : {RandomStream::parameter, RandomStream::sampling}) {
      for (const uint32_t substream : {0U, 1U, 1U << 31}) {
        for (const uint64_t index : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
          seen.insert(random_words(seed, stream, substream, index));
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), 3U * 2 * 3 * 3);
}

TEST(RandomStepSeed, EveryArgumentMatters) {
  std::set<uint64_t> seen;
  for (const uint64_t seed : {uint64_t{1}, uint64_t{2}}) {
    for (const RandomStream stream : {RandomStream::router_noise, RandomStream::random_logits}) {
      for (const uint32_t substream : {0U, 1U}) {
        for (uint64_t step = 0; step < 100; ++step) {
          seen.insert(random_step_seed(seed, stream, substream, step));
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), 2U * 2 * 2 * 100);
}

// Across the lanes, the rest after them, and the carry from the low to the high word of the index.
TEST(RandomWords, FilledInBulkAreTheSame) {
  constexpr uint64_t kSeed = 0x123456789abcdefU;
  for (const int64_t count : {0, 1, 15, 16, 17, 50}) {
    for (const uint64_t first : {uint64_t{0}, uint64_t{3}, (uint64_t{1} << 32) - 5}) {
      std::vector<uint32_t> words(static_cast<size_t>(4 * count));
      fill_random_words(kSeed, RandomStream::dropout, 7, first, count, words.data());
      for (size_t i = 0; i < words.size(); ++i) {
        ASSERT_EQ(words[i], random_words(kSeed, RandomStream::dropout, 7, first + i / 4)[i % 4])
            << count << " from " << first << ", word " << i;
      }
    }
  }
}

// The same cases, and the same bits: whatever the compiler makes of the vectors.
TEST(RandomNormal, FilledInBulkAreTheSame) {
  constexpr uint64_t kSeed = 0x123456789abcdefU;
  for (const int64_t count : {0, 1, 15, 16, 17, 1000}) {
    for (const uint64_t first : {uint64_t{0}, uint64_t{3}, (uint64_t{1} << 32) - 5}) {
      std::vector<double> values(static_cast<size_t>(count));
      fill_random_normals(kSeed, RandomStream::parameter, 7, first, count, values.data());
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i], random_normal(kSeed, RandomStream::parameter, 7, first + i))
            << count << " from " << first << ", value " << i;
      }
    }
  }
}

// Against the C library's functions in long double; the angle is reduced exactly, as its cosine has
// zeros. 2.4 units of the last place was the largest error of two million draws.
TEST(RandomNormal, IsTheBoxMullerTransform) {
  constexpr long double kHalfPi = 1.57079632679489661923132169163975144L;
  const auto unit = [](uint32_t high, uint32_t low) {
    return static_cast<long double>(((uint64_t{high} << 32) | low) >> 11) * 0x1.0p-53L;
  };
  for (uint64_t i = 0; i < 50000; ++i) {
    const Words words = random_words(5, RandomStream::test, 0, i);
    const long double u = 1 - unit(words[0], words[1]);
    const long double v = unit(words[2], words[3]);
    const long double exact =
        std::sqrt(-2 * std::log(u)) * std::sin(kHalfPi * (std::abs(4 * v - 2) - 1));
    ASSERT_NEAR(random_normal(5, RandomStream::test, 0, i), static_cast<double>(exact),
                4 * 0x1.0p-52 * static_cast<double>(std::abs(exact)))
        << i;
  }
}

constexpr int kDraws = 100000;

// Bounds are five standard errors of the mean over the draws; the numbers are fixed by the seed, so
// a pass is a pass for good.
void expect_mean(const std::vector<double>& values, double mean, double deviation) {
  double sum = 0;
  for (const double value : values) sum += value;
  const auto count = static_cast<double>(values.size());
  EXPECT_NEAR(sum / count, mean, 5 * deviation / std::sqrt(count));
}

std::vector<double> powers(const std::vector<double>& values, int power) {
  std::vector<double> result;
  for (const double value : values) result.push_back(std::pow(value, power));
  return result;
}

TEST(RandomUniform, Moments) {
  std::vector<double> values;
  for (uint64_t i = 0; i < kDraws; ++i) {
    values.push_back(random_uniform(11, RandomStream::test, 0, i));
    ASSERT_GE(values.back(), 0.0);
    ASSERT_LT(values.back(), 1.0);
  }
  // E[x^n] = 1 / (n + 1), Var[x^n] = 1 / (2n + 1) - 1 / (n + 1)^2.
  for (const int n : {1, 2, 3, 4}) {
    expect_mean(powers(values, n), 1.0 / (n + 1),
                std::sqrt(1.0 / (2 * n + 1) - 1.0 / ((n + 1) * (n + 1))));
  }
}

TEST(RandomUniform, NeighboursAreNotCorrelated) {
  std::vector<double> products;
  for (uint64_t i = 0; i < kDraws; ++i) {
    products.push_back((random_uniform(11, RandomStream::test, 0, i) - 0.5) *
                       (random_uniform(11, RandomStream::test, 0, i + 1) - 0.5));
  }
  expect_mean(products, 0, 1.0 / 12);
}

TEST(RandomNormal, Moments) {
  std::vector<double> values;
  for (uint64_t i = 0; i < kDraws; ++i) {
    values.push_back(random_normal(11, RandomStream::test, 0, i));
    ASSERT_TRUE(std::isfinite(values.back()));
  }
  // E[x^2] = 1, E[x^4] = 3; variances 1, 2, 15, 96.
  expect_mean(values, 0, 1);
  expect_mean(powers(values, 2), 1, std::sqrt(2.0));
  expect_mean(powers(values, 3), 0, std::sqrt(15.0));
  expect_mean(powers(values, 4), 3, std::sqrt(96.0));
}

TEST(RandomNormal, Tails) {
  int beyond_two = 0;
  int beyond_four = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double value = std::abs(random_normal(12, RandomStream::test, 0, i));
    beyond_two += value > 2;
    beyond_four += value > 4;
  }
  // 4.55 % lie beyond 2 (five standard errors of the count: 330), 6.3 in 100000 beyond 4.
  EXPECT_NEAR(beyond_two, 4550, 330);
  EXPECT_GE(beyond_four, 1);
  EXPECT_LE(beyond_four, 19);
}

TEST(RandomBelow, IsUniform) {
  for (const uint64_t bound : {uint64_t{1}, uint64_t{2}, uint64_t{7}, uint64_t{10}}) {
    std::vector<int> counts(bound);
    for (uint64_t i = 0; i < kDraws; ++i) {
      const uint64_t value = random_below(bound, 3, RandomStream::test, 0, i);
      ASSERT_LT(value, bound);
      ++counts[value];
    }
    const double p = 1.0 / static_cast<double>(bound);
    for (const int count : counts) {
      EXPECT_NEAR(count, kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p))) << bound;
    }
  }
}

TEST(RandomBelow, LargeBounds) {
  constexpr uint64_t kBound = (uint64_t{1} << 63) + 12345;
  bool upper_half = false;
  for (uint64_t i = 0; i < 100; ++i) {
    const uint64_t value = random_below(kBound, 3, RandomStream::test, 0, i);
    ASSERT_LT(value, kBound);
    upper_half = upper_half || value > kBound / 2;
  }
  EXPECT_TRUE(upper_half);
}

}  // namespace
}  // namespace troupe
