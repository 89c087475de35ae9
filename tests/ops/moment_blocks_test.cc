// The codes and scales of moments in 8 bits: each number becomes a code beside it, as often as its
// expected value asks for, and what a code stands for is left alone.
#include "ops/optimizer/adamw/moment_blocks.h"

#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>

namespace troupe {
namespace {

constexpr uint32_t kDraws = 1U << 20;
constexpr int kLargest = 0x7e;

float number_of(int code) {
  f8e4m3 value;
  value.bits = static_cast<uint8_t>(code);
  return value;
}

TEST(DrawE4m3, LeavesWhatACodeStandsForAlone) {
  for (int code = 0; code <= kLargest; ++code) {
    for (const uint32_t draw : {0U, 1U, kDraws / 2, kDraws - 1}) {
      EXPECT_EQ(draw_e4m3(number_of(code), draw), code) << draw;
    }
  }
}

// The upper code is taken by as many of the 2^20 draws as the distance from the lower one asks for.
TEST(DrawE4m3, TakesTheUpperCodeAsOftenAsTheExpectedValueAsksFor) {
  for (int code = 0; code < kLargest; ++code) {
    const double below = number_of(code);
    const double above = number_of(code + 1);
    for (const double part : {0x1p-12, 0.25, 0.5, 0.75, 1 - 0x1p-12}) {
      const auto value = static_cast<float>(below + part * (above - below));
      const auto first = static_cast<uint32_t>((1 - part) * kDraws);  // that takes the upper one
      EXPECT_EQ(draw_e4m3(value, 0), code) << value;
      EXPECT_EQ(draw_e4m3(value, first - 1), code) << value;
      EXPECT_EQ(draw_e4m3(value, first), code + 1) << value;
      EXPECT_EQ(draw_e4m3(value, kDraws - 1), code + 1) << value;
    }
  }
}

TEST(DrawE4m3, StaysInRange) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value : {448.5F, 480.0F, 3e38F, kInfinity}) {
    EXPECT_EQ(draw_e4m3(value, kDraws - 1), kLargest) << value;
  }
  EXPECT_EQ(draw_e4m3(std::nanf(""), 0), 0x7f);
  EXPECT_EQ(draw_e4m3(1e-40F, kDraws - 1), 0);
}

TEST(MomentScale, IsTheLeastThatHoldsTheLargestElement) {
  for (const float largest : {1e-30F, 0.001F, 1.0F, 1.75F, 1.7500001F, 448.0F, 449.0F, 3.4e38F}) {
    const uint8_t s = moment_scale_of(std::bit_cast<uint32_t>(largest));
    EXPECT_LE(largest * inverse_moment_scale(s), 448.0F) << largest;
    EXPECT_GT(2 * largest * inverse_moment_scale(s), 448.0F) << largest;
    EXPECT_EQ(moment_scale(s) * inverse_moment_scale(s), 1.0F);
  }
}

TEST(MomentScale, OfZerosSmallAndInfiniteNumbers) {
  EXPECT_EQ(moment_scale(0), 0.0F) << "of moments before the first update";
  EXPECT_EQ(moment_scale_of(0), 1);
  EXPECT_EQ(moment_scale_of(std::bit_cast<uint32_t>(1e-42F)), 1);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const uint8_t s = moment_scale_of(std::bit_cast<uint32_t>(kInfinity));
  EXPECT_EQ(number_of(kLargest) * moment_scale(s), kInfinity);
  EXPECT_EQ(draw_e4m3(kInfinity * inverse_moment_scale(s), 0), kLargest);
}

TEST(MomentScales, OneForEachBlockOfTheLastDimension) {
  EXPECT_EQ(moment_scales_shape({4, 64}), Shape({4, 2}));
  EXPECT_EQ(moment_scales_shape({2, 3, 65}), Shape({2, 3, 3}));
  EXPECT_EQ(moment_scales_shape({7, 1}), Shape({7, 1}));
}

}  // namespace
}  // namespace troupe
