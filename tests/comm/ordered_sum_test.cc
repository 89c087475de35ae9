// Sums over ranks have the bits of adding the terms one by one, ascending, in the accumulation
// dtype: of -0 also the sign.
#include "comm/ordered_sum.h"

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

namespace troupe {
namespace {

template <class T>
std::vector<T> sum_of(const std::vector<std::vector<T>>& terms) {
  std::vector<T> result(terms.front().size());
  ThreadPool pool(1);
  sum_elements<T, float>(
      terms.size(), [&](size_t k) { return terms[k].data(); }, 1,
      [&](size_t) { return result.data(); }, {0, static_cast<int64_t>(result.size())}, pool);
  return result;
}

TEST(OrderedSum, AddsInTheOrderOfRanks) {
  constexpr float kLarge = 0x1p24F;  // + 1 is itself
  EXPECT_EQ(sum_of<float>({{kLarge, kLarge}, {1, -kLarge}, {-kLarge, 1}}),
            (std::vector<float>{0, 1}));
}

TEST(OrderedSum, RoundsOnce) {
  // Each sum of two is halfway between bf16 numbers; the sum of all is one of them.
  const std::vector<bf16> sum = sum_of<bf16>({{bf16(256.0F)}, {bf16(1.0F)}, {bf16(1.0F)}});
  EXPECT_EQ(static_cast<float>(sum[0]), 258.0F);
}

TEST(OrderedSum, BeginsWithTheFirstTerm) {
  const std::vector<float> sum = sum_of<float>({{-0.0F, -0.0F}, {-0.0F, 0.0F}});
  EXPECT_TRUE(std::signbit(sum[0]));
  EXPECT_FALSE(std::signbit(sum[1]));
}

TEST(OrderedSum, CountsUpToAndWithTheOwnRank) {
  const std::vector<std::vector<int32_t>> counts = {{1, 10}, {2, 20}, {4, 40}};
  for (int place = 0; place < 3; ++place) {
    std::vector<int32_t> running(2);
    std::vector<int32_t> total(2);
    sum_counts(
        3, place, 2, [&](int rank) { return counts[static_cast<size_t>(rank)].data(); },
        running.data(), total.data());
    const std::vector<std::vector<int32_t>> expected = {{1, 10}, {3, 30}, {7, 70}};
    EXPECT_EQ(running, expected[static_cast<size_t>(place)]);
    EXPECT_EQ(total, expected[2]);
  }
}

}  // namespace
}  // namespace troupe
