// Numbers in 4 bits: which they are, what they are rounded to, and their two scales, by numbers
// that are written out.
#include "ops/precision/fp4_block.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <vector>

namespace troupe::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Fp4, TheNearestNumberWithTiesToEven) {
  const float numbers[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (const float each : numbers) {
    EXPECT_EQ(nearest_fp4(each), each);
    EXPECT_EQ(nearest_fp4(-each), -each);
    EXPECT_EQ(stochastic_fp4(each, 0), each);
    EXPECT_EQ(stochastic_fp4(each, 0.999F), each);
  }
  // Between two numbers the even one is that with the last bit of the code 0.
  const float ties[][2] = {{0.25F, 0}, {0.75F, 1}, {1.25F, 1}, {1.75F, 2},
                           {2.5F, 2},  {3.5F, 4},  {5, 4}};
  for (const auto& [tie, even] : ties) {
    EXPECT_EQ(nearest_fp4(tie), even) << tie;
    EXPECT_LT(nearest_fp4(std::nextafter(tie, 0.0F)), nearest_fp4(std::nextafter(tie, 9.0F)));
  }
  EXPECT_EQ(nearest_fp4(7), 6);
  EXPECT_EQ(nearest_fp4(-1e9F), -6);
  EXPECT_EQ(nearest_fp4(kInfinity), 6);
  EXPECT_TRUE(std::isnan(nearest_fp4(kNaN)));
  EXPECT_TRUE(std::isnan(stochastic_fp4(kNaN, 0.5F)));
}

TEST(Fp4, UpAsOftenAsIsNearTheUpperNumber) {
  EXPECT_EQ(stochastic_fp4(0.125F, 0.24F), 0.5F);
  EXPECT_EQ(stochastic_fp4(0.125F, 0.25F), 0);
  EXPECT_EQ(stochastic_fp4(-2.75F, 0.74F), -3);
  EXPECT_EQ(stochastic_fp4(-2.75F, 0.75F), -2);
  EXPECT_EQ(stochastic_fp4(4.5F, 0.24F), 6);
  EXPECT_EQ(stochastic_fp4(4.5F, 0.25F), 4);
  EXPECT_EQ(stochastic_fp4(6.5F, 0), 6);
}

// 15 equal numbers in each of many blocks: the mean of what they become is what they are, within
// five standard deviations of at most half a step.
TEST(Fp4, DrawsHaveTheRightMean) {
  constexpr int kBlocks = 4096;
  double sum = 0;
  for (int block = 0; block < kBlocks; ++block) {
    std::vector<float> x(kFp4Block, 2.3F);
    x[0] = static_cast<float>(block);  // another block each
    const Fp4Draws draws(x.data(), kFp4Block);
    for (int i = 1; i < kFp4Block; ++i) sum += stochastic_fp4(x[1], draws.at(i));
  }
  const double count = kBlocks * (kFp4Block - 1);
  EXPECT_NEAR(sum / count, 2.3, 5 * 0.5 / std::sqrt(count));
  // The same block draws the same, and its places differ.
  const std::vector<float> x(kFp4Block, 1);
  const Fp4Draws one(x.data(), kFp4Block);
  const Fp4Draws other(x.data(), kFp4Block);
  EXPECT_EQ(one.at(3), other.at(3));
  EXPECT_NE(one.at(3), one.at(4));
}

// The largest element of all becomes 6 times 448 by the scale of the matrix: its block's scale is
// the largest E4M3, its code the largest. Others by hand.
TEST(Fp4, TwoScales) {
  const Fp4Scale largest = fp4_scale(8, 8);
  EXPECT_FLOAT_EQ(largest.scale, 8.0F / 6);
  EXPECT_FLOAT_EQ(8 * largest.factor, 6);
  // encode = 2688 / 8 = 336; 1 / 6 * 336 = 56, an E4M3 number.
  const Fp4Scale small = fp4_scale(8, 1);
  EXPECT_FLOAT_EQ(small.scale, 56.0F / 336);
  EXPECT_FLOAT_EQ(small.factor, 6);
  // 1.1 / 6 * 336 = 61.6, whose nearest E4M3 is 60 (steps of 4): the scale is a little too small.
  EXPECT_FLOAT_EQ(fp4_scale(8, 1.1F).scale, 60.0F / 336);
  // Below half the smallest E4M3, 2^-9: zeros.
  EXPECT_EQ(fp4_scale(8, 1e-5F).factor, 0);
  EXPECT_EQ(fp4_scale(0, 0).scale, 0);
  EXPECT_TRUE(std::isnan(fp4_scale(kNaN, kNaN).scale));
  std::vector<float> x = {8, -4, 1.4F, 0};
  EXPECT_FLOAT_EQ(quantize_fp4(x.data(), 4, 8, /*stochastic=*/false), 8.0F / 6);
  EXPECT_EQ(x, (std::vector<float>{6, -3, 1, 0}));
}

TEST(Fp4, ARotationIsOrthogonal) {
  std::vector<std::vector<float>> columns;
  for (int i = 0; i < kFp4Block; ++i) {
    std::vector<float> unit(kFp4Block, 0);
    unit[static_cast<size_t>(i)] = 1;
    rotate_fp4(unit.data());
    for (const float each : unit) EXPECT_EQ(std::abs(each), 0.25F);
    columns.push_back(unit);
  }
  for (size_t i = 0; i < columns.size(); ++i) {
    for (size_t j = 0; j < columns.size(); ++j) {
      EXPECT_EQ(std::inner_product(columns[i].begin(), columns[i].end(), columns[j].begin(), 0.0F),
                i == j ? 1 : 0);
    }
  }
}

}  // namespace
}  // namespace troupe::testing
