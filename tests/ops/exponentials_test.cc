// The exponentials and sums of exponentials under softmax.
#include "ops/cpu/exponentials.h"

#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "base/random.h"

namespace troupe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// 1.19 ulp was the largest error over a 1/61 sample of all floats and of these, without FMA; with
// it, 0.94.
TEST(ScaledExponentials, IsWithinAnUlpOfTheExponential) {
  std::vector<float> x;
  for (double at = -87.33; at <= 88; at += 0.00037) x.push_back(static_cast<float>(at));
  std::vector<float> y = x;
  scaled_exponentials(y.data(), static_cast<int64_t>(y.size()), 0, 1, y.data());
  double worst = 0;
  float worst_at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(double{x[i]});
    const auto rounded = static_cast<float>(exact);
    const float spacing = std::nextafter(rounded, kInfinity) - rounded;
    const double error = std::abs(y[i] - exact) / spacing;
    if (error > worst) {
      worst = error;
      worst_at = x[i];
    }
  }
  EXPECT_LE(worst, 1.2) << "at " << worst_at;
}

TEST(ScaledExponentials, LimitsAndNan) {
  // The last: every bit set, as in memory that was never a number.
  std::vector<float> x = {0.0F,
                          -0.0F,
                          -kInfinity,
                          -1e30F,
                          -87.34F,
                          -87.3F,
                          2 * kInfinity - kInfinity,
                          kNan,
                          -kNan,
                          std::bit_cast<float>(~0U)};
  scaled_exponentials(x.data(), static_cast<int64_t>(x.size()), 0, 1, x.data());
  EXPECT_EQ(x[0], 1.0F);
  EXPECT_EQ(x[1], 1.0F);
  EXPECT_EQ(x[2], 0.0F);
  EXPECT_EQ(x[3], 0.0F);
  EXPECT_EQ(x[4], 0.0F) << "the exact value is denormal";
  EXPECT_GT(x[5], 0.0F);
  for (size_t i = 6; i < x.size(); ++i) EXPECT_TRUE(std::isnan(x[i])) << i;
}

// The same bits wherever an element stands, and nothing is written beyond the last.
template <class T>
void expect_same_everywhere() {
  using A = accumulation_t<T>;
  for (const int64_t n : {0, 1, 15, 16, 17, 40}) {
    std::vector<T> x;
    for (int64_t i = 0; i < n; ++i) x.push_back(static_cast<T>(-0.37 * static_cast<double>(i + 1)));
    std::vector<T> y(x.size() + 1, T(7.0F));
    scaled_exponentials(x.data(), n, A(0.25), A(-3), y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      T alone;
      scaled_exponentials(&x[i], 1, A(0.25), A(-3), &alone);
      EXPECT_EQ(widen(y[i]), widen(alone)) << i << " of " << n;
      const double exact = -3 * std::exp(static_cast<double>(widen(x[i])) - 0.25);
      // Half a unit of T's last place, and for float what the test above allows and a difference of
      // up to 15, rounded.
      EXPECT_NEAR(static_cast<double>(widen(y[i])), exact,
                  std::abs(exact) * (sizeof(T) == 2 ? 0x1.1p-8 : 2e-6))
          << i << " of " << n;
    }
    EXPECT_EQ(widen(y.back()), A(7)) << n;
  }
}

TEST(ScaledExponentials, DoNotDependOnThePlace) {
  expect_same_everywhere<double>();
  expect_same_everywhere<float>();
  expect_same_everywhere<bf16>();
}

// Every exponent and sign, values on and around the middle between two bf16, and NaN.
TEST(StoreVector, RoundsAsTheConstructor) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    float values[16];
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1234, 0x9876};
      values[i] = std::bit_cast<float>(high << 16 | low[i % 8]);
    }
    VectorFloats vector;
    load_vector(values, vector);
    bf16 stored[16];
    store_vector(vector, stored);
    for (size_t i = 0; i < 16; ++i) ASSERT_EQ(stored[i].bits, bf16(values[i]).bits) << values[i];
    load_vector(stored, vector);
    for (size_t i = 0; i < 16; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(vector[i]), uint32_t{stored[i].bits} << 16);
    }
  }
}

template <class T>
class ExponentialSumTest : public ::testing::Test {};
using StorageTypes = ::testing::Types<double, float, bf16>;
TYPED_TEST_SUITE(ExponentialSumTest, StorageTypes);

// Of the maximum: exact. Of the sum, by element: the exponential's 1.2 ulp and the rounding of the
// difference (its size times half an epsilon), and of the order of n / 64 + 10 rounded sums; the
// terms are positive.
template <class T>
void expect_sum(const std::vector<T>& x) {
  using A = accumulation_t<T>;
  const auto n = static_cast<int64_t>(x.size());
  const auto [largest, total] = exponential_sum(x.data(), n);
  double exact_largest = -std::numeric_limits<double>::infinity();
  for (const T value : x)
    exact_largest = std::max(exact_largest, static_cast<double>(widen(value)));
  EXPECT_EQ(static_cast<double>(largest), exact_largest) << n;
  double exact = 0;
  double tolerance = 0;
  const double epsilon = std::numeric_limits<A>::epsilon();
  for (const T value : x) {
    const double difference = static_cast<double>(widen(value)) - exact_largest;
    const double term = std::exp(difference);
    exact += term;
    tolerance += term * epsilon *
                 (2 - (std::isfinite(difference) ? difference : 0) + static_cast<double>(n) / 16);
  }
  EXPECT_NEAR(static_cast<double>(total), exact, tolerance) << n;
}

template <class T>
std::vector<T> logits(int64_t n, double deviation, double slope) {
  std::vector<T> x;
  for (int64_t i = 0; i < n; ++i) {
    const double value =
        deviation * random_normal(4, RandomStream::test, 0, static_cast<uint64_t>(i)) +
        slope * static_cast<double>(i);
    x.push_back(static_cast<T>(value));
  }
  return x;
}

// Around the steps of 64 elements and the blocks of 1024.
TYPED_TEST(ExponentialSumTest, AgreesWithTheDefinition) {
  for (const int64_t n :
       {1, 2, 16, 63, 64, 65, 127, 1023, 1024, 1025, 1088, 2047, 2048, 2050, 5000}) {
    expect_sum(logits<TypeParam>(n, 3, 0));
    expect_sum(logits<TypeParam>(n, 1, 0.05));   // the maximum grows from block to block
    expect_sum(logits<TypeParam>(n, 1, -0.05));  // the first block has it
    expect_sum(logits<TypeParam>(n, 40, 0));     // most terms vanish
  }
}

TYPED_TEST(ExponentialSumTest, MaskedElementsCountNothing) {
  for (const size_t n : {70U, 3000U}) {
    std::vector<TypeParam> x(n, TypeParam(-kInfinity));
    x.back() = TypeParam(2.0F);
    EXPECT_EQ(exponential_sum(x.data(), static_cast<int64_t>(n)).total, 1) << n;
    x.back() = TypeParam(-kInfinity);
    x.front() = TypeParam(-2.0F);
    const auto [largest, total] = exponential_sum(x.data(), static_cast<int64_t>(n));
    EXPECT_EQ(largest, -2) << n;
    EXPECT_EQ(total, 1) << n;
  }
}

TYPED_TEST(ExponentialSumTest, NothingAtAll) {
  for (const int64_t n : {0, 5, 64, 2000}) {
    const std::vector<TypeParam> x(static_cast<size_t>(n), TypeParam(-kInfinity));
    const auto [largest, total] = exponential_sum(x.data(), n);
    EXPECT_EQ(largest, -std::numeric_limits<accumulation_t<TypeParam>>::infinity()) << n;
    EXPECT_EQ(total, 0) << n;
  }
}

TYPED_TEST(ExponentialSumTest, NanAndInfinityAreSeen) {
  for (const float bad : {kNan, -kNan, kInfinity}) {
    for (const size_t at : {0U, 63U, 64U, 1500U, 2049U}) {
      auto x = logits<TypeParam>(2050, 1, 0);
      x[at] = TypeParam(bad);
      EXPECT_TRUE(std::isnan(exponential_sum(x.data(), 2050).total)) << bad << " at " << at;
    }
  }
}

}  // namespace
}  // namespace troupe
