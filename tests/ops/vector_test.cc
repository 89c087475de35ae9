// The arithmetic under the CPU kernels: reductions, conversions and the vectorisable exponential.
#include "ops/cpu/vector.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "base/random.h"

namespace troupe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class T>
std::vector<T> normal_numbers(int64_t n, uint32_t substream) {
  std::vector<T> values;
  for (int64_t i = 0; i < n; ++i) {
    values.push_back(
        static_cast<T>(random_normal(3, RandomStream::test, substream, static_cast<uint64_t>(i))));
  }
  return values;
}

// The distance in units of the last place of the exact result.
double ulp_error(float value, double exact) {
  const auto rounded = static_cast<float>(exact);
  const float spacing = std::nextafter(std::abs(rounded), kInfinity) - std::abs(rounded);
  return std::abs(value - exact) / spacing;
}

template <class T>
class VectorTest : public ::testing::Test {};
using StorageTypes = ::testing::Types<double, float, bf16>;
TYPED_TEST_SUITE(VectorTest, StorageTypes);

TYPED_TEST(VectorTest, ReductionsAgreeWithPlainSums) {
  using A = accumulation_t<TypeParam>;
  // A sum of n terms in type A, each partial sum rounded: n eps times the sum of magnitudes.
  const double epsilon = std::numeric_limits<A>::epsilon();
  for (const int64_t n : {0, 1, 7, 15, 16, 17, 31, 32, 33, 100, 1000}) {
    const auto a = normal_numbers<TypeParam>(n, 0);
    const auto b = normal_numbers<TypeParam>(n, 1);
    double sum_exact = 0;
    double dot_exact = 0;
    double squares_exact = 0;
    double magnitude = 0;
    double largest = -std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < n; ++i) {
      const double x = a[static_cast<size_t>(i)];
      const double y = b[static_cast<size_t>(i)];
      sum_exact += x;
      dot_exact += x * y;
      squares_exact += x * x;
      magnitude += std::abs(x) + std::abs(x * y) + x * x;
      largest = std::max(largest, x);
    }
    const double tolerance = static_cast<double>(n + 1) * epsilon * magnitude;
    EXPECT_NEAR(sum(a.data(), n), sum_exact, tolerance) << n;
    EXPECT_NEAR(dot(a.data(), b.data(), n), dot_exact, tolerance) << n;
    EXPECT_NEAR(sum_of_squares(a.data(), n), squares_exact, tolerance) << n;
    EXPECT_EQ(max(a.data(), n), static_cast<A>(largest)) << n;
  }
}

// The order of the sum is part of the contract: element i goes to lane i % 16, then lanes are added
// pairwise.
TYPED_TEST(VectorTest, SumHasTheFixedLanes) {
  using A = accumulation_t<TypeParam>;
  for (const int64_t n : {5, 16, 43, 256}) {
    const auto x = normal_numbers<TypeParam>(n, 2);
    A lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i % 16] += widen(x[static_cast<size_t>(i)]);
    for (const int width : {8, 4, 2, 1}) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    EXPECT_EQ(sum(x.data(), n), lanes[0]) << n;
  }
}

TYPED_TEST(VectorTest, MaxPassesOverNanAndKnowsNegatives) {
  using A = accumulation_t<TypeParam>;
  std::vector<TypeParam> x(21, TypeParam(-4.0F));
  EXPECT_EQ(max(x.data(), 21), A(-4));
  x[3] = TypeParam(kNan);
  x[20] = TypeParam(-2.0F);
  EXPECT_EQ(max(x.data(), 21), A(-2));
  x[16] = TypeParam(kInfinity);
  EXPECT_EQ(max(x.data(), 21), std::numeric_limits<A>::infinity());
  EXPECT_EQ(max(x.data(), 0), -std::numeric_limits<A>::infinity());
}

TYPED_TEST(VectorTest, ElementwiseHelpers) {
  using A = accumulation_t<TypeParam>;
  constexpr int64_t kCount = 37;
  const auto x = normal_numbers<TypeParam>(kCount, 3);
  const auto start = normal_numbers<A>(kCount, 4);
  std::vector<A> wide(kCount);
  load(x.data(), wide.data(), kCount);
  std::vector<TypeParam> narrow(kCount);
  store(start.data(), narrow.data(), kCount);
  std::vector<A> added = start;
  add_to(x.data(), added.data(), kCount);
  std::vector<A> scaled = start;
  axpy(A(0.5), x.data(), scaled.data(), kCount);
  for (size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(wide[i], static_cast<A>(x[i]));
    EXPECT_EQ(widen(narrow[i]), static_cast<A>(TypeParam(start[i])));
    EXPECT_EQ(added[i], start[i] + wide[i]);
    EXPECT_EQ(scaled[i], start[i] + A(0.5) * wide[i]);  // half of x is exact, so FMA or not is one
  }
}

// 1.05 ulp was the largest error over a 1/61 sample of all floats; 1.1 leaves room for compilers
// that do not contract to FMA.
TEST(ExpFast, IsWithinAnUlpOfTheExponential) {
  double worst = 0;
  float worst_at = 0;
  for (double x = -87.33; x < 88.72; x += 0.00037) {
    const auto argument = static_cast<float>(x);
    const double error = ulp_error(exp_fast(argument), std::exp(double{argument}));
    if (error > worst) {
      worst = error;
      worst_at = argument;
    }
  }
  EXPECT_LE(worst, 1.1) << "at " << worst_at;
}

TEST(ExpFast, LimitsAndNan) {
  EXPECT_EQ(exp_fast(0.0F), 1.0F);
  EXPECT_EQ(exp_fast(-0.0F), 1.0F);
  EXPECT_EQ(exp_fast(-kInfinity), 0.0F);
  EXPECT_EQ(exp_fast(-1e30F), 0.0F);
  EXPECT_EQ(exp_fast(-87.34F), 0.0F);  // the exact value is denormal
  EXPECT_GT(exp_fast(-87.33F), 0.0F);
  EXPECT_LT(exp_fast(88.72F), kInfinity);
  EXPECT_EQ(exp_fast(88.73F), kInfinity);
  EXPECT_EQ(exp_fast(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(exp_fast(kNan)));
  EXPECT_TRUE(std::isnan(exp_fast(-kNan)));
}

// Inside a loop that the compiler vectorises, the same bits as one by one.
TEST(ExpFast, VectorisedLoopGivesTheSameBits) {
  std::vector<float> x;
  for (int i = -1000; i < 1000; ++i) x.push_back(static_cast<float>(i) * 0.0931F);
  x.insert(x.end(), {-kInfinity, kInfinity, -88.0F, 89.0F});
  std::vector<float> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = exp_fast(x[i]);
  for (size_t i = 0; i < x.size(); ++i) {
    const volatile float argument = x[i];
    EXPECT_EQ(y[i], exp_fast(argument)) << x[i];
  }
}

TEST(Sigmoid, AccuracyAndLimits) {
  double worst = 0;
  for (double x = -87; x < 87; x += 0.0013) {
    const auto argument = static_cast<float>(x);
    worst = std::max(worst, ulp_error(sigmoid(argument), 1 / (1 + std::exp(-double{argument}))));
  }
  EXPECT_LE(worst, 3.0);  // the exponential's ulp, a rounded sum and a rounded quotient
  EXPECT_EQ(sigmoid(0.0F), 0.5F);
  EXPECT_EQ(sigmoid(-kInfinity), 0.0F);
  EXPECT_EQ(sigmoid(kInfinity), 1.0F);
  EXPECT_TRUE(std::isnan(sigmoid(kNan)));
  EXPECT_EQ(sigmoid(0.0), 0.5);
  EXPECT_NEAR(sigmoid(-3.0), 1 / (1 + std::exp(3.0)), 1e-16);
}

// Against erfc and exp in double; the header states the bounds. (1.5e-7 was the largest error here:
// that of 1/2 after a rounded exponential, quotient, polynomial and product.)
TEST(NormalDistribution, AccuracyAndLimits) {
  double worst_absolute = 0;
  double worst_share = 0;  // of the relative error in its bound
  for (double x = -14; x < 14; x += 0.00071) {
    const auto argument = static_cast<float>(x);
    const double exact[] = {std::exp(-0.5 * double{argument} * argument) / std::sqrt(2 * M_PI),
                            0.5 * std::erfc(-double{argument} / std::sqrt(2.0))};
    const NormalDistribution<float> normal = normal_distribution(argument);
    const float actual[] = {normal.density, normal.cumulative};
    for (int i = 0; i < 2; ++i) {
      const double error = std::abs(actual[i] - exact[i]);
      worst_absolute = std::max(worst_absolute, error);
      if (exact[i] < 1e-37) continue;
      worst_share = std::max(worst_share, error / exact[i] / ((4 + x * x / 2) * 1e-7));
    }
  }
  EXPECT_LE(worst_absolute, 2e-7);
  EXPECT_LE(worst_share, 1.0);
  EXPECT_NEAR(normal_distribution(0.0F).cumulative, 0.5F, 2e-7);
  EXPECT_EQ(normal_distribution(-kInfinity).cumulative, 0.0F);
  EXPECT_EQ(normal_distribution(kInfinity).cumulative, 1.0F);
  EXPECT_EQ(normal_distribution(-1e30F).cumulative, 0.0F);
  EXPECT_EQ(normal_distribution(1e30F).density, 0.0F);
  EXPECT_TRUE(std::isnan(normal_distribution(kNan).cumulative));
  EXPECT_TRUE(std::isnan(normal_distribution(kNan).density));
  EXPECT_NEAR(normal_distribution(-1.0).cumulative, 0.15865525393145705, 1e-16);
  EXPECT_NEAR(normal_distribution(-1.0).density, 0.24197072451914337, 1e-16);
}

}  // namespace
}  // namespace troupe
