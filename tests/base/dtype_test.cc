// Element types, the rounding of bfloat16, what the codes of 8 bits stand for and which of them is
// nearest to a number.
#include "base/dtype.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <gtest/gtest.h>
#include <limits>

namespace troupe {
namespace {

float from_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
uint32_t rounded(uint32_t bits) {
  return bf16(from_bits(bits)).bits;
}

TEST(Bf16, EveryValueComesBack) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    bf16 value;
    value.bits = static_cast<uint16_t>(bits);
    const float wide = value;
    ASSERT_EQ(std::bit_cast<uint32_t>(wide), bits << 16);
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(bf16(wide))));
    } else {
      ASSERT_EQ(bf16(wide).bits, bits);
    }
  }
}

TEST(Bf16, RoundsToTheNearest) {
  EXPECT_EQ(rounded(0x3f800000), 0x3f80U);  // 1
  EXPECT_EQ(rounded(0x3f800001), 0x3f80U);
  EXPECT_EQ(rounded(0x3f807fff), 0x3f80U) << "just below half way";
  EXPECT_EQ(rounded(0x3f808001), 0x3f81U) << "just above half way";
  EXPECT_EQ(rounded(0x3f80ffff), 0x3f81U);
  EXPECT_EQ(rounded(0xbf808001), 0xbf81U) << "symmetric";
}

TEST(Bf16, TiesGoToEven) {
  EXPECT_EQ(rounded(0x3f808000), 0x3f80U);
  EXPECT_EQ(rounded(0x3f818000), 0x3f82U);
  EXPECT_EQ(rounded(0x3f828000), 0x3f82U);
  EXPECT_EQ(rounded(0xbf818000), 0xbf82U);
  EXPECT_EQ(rounded(0x3fff8000), 0x4000U) << "the carry reaches the exponent";
}

TEST(Bf16, Zeros) {
  EXPECT_EQ(bf16(0.0F).bits, 0);
  EXPECT_EQ(bf16(-0.0F).bits, 0x8000);
  EXPECT_TRUE(std::signbit(static_cast<float>(bf16(-0.0F))));
}

TEST(Bf16, Infinities) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(static_cast<float>(bf16(kInfinity)), kInfinity);
  EXPECT_EQ(static_cast<float>(bf16(-kInfinity)), -kInfinity);
  EXPECT_EQ(rounded(0x7f7fffff), 0x7f80U) << "the largest float is above half of the last step";
  EXPECT_EQ(rounded(0x7f7f7fff), 0x7f7fU) << "the largest that stays finite";
  EXPECT_EQ(rounded(0x7f7f8000), 0x7f80U);
}

TEST(Bf16, NanStaysNan) {
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::numeric_limits<float>::quiet_NaN()))));
  // Its payload lies in the lower half: cut off, an infinity would be left.
  EXPECT_EQ(rounded(0x7f800001), 0x7fc0U);
  EXPECT_EQ(rounded(0xff800001), 0xffc0U);
  EXPECT_EQ(rounded(0x7fffffff), 0x7fffU);
}

TEST(Bf16, Denormals) {
  EXPECT_EQ(rounded(0x00000001), 0x0000U);
  EXPECT_EQ(rounded(0x00008000), 0x0000U) << "a tie with zero, which is even";
  EXPECT_EQ(rounded(0x00008001), 0x0001U);
  EXPECT_EQ(rounded(0x80018000), 0x8002U);
  EXPECT_EQ(rounded(0x007fffff), 0x0080U) << "rounds up to the smallest normal number";
}

TEST(Bf16, FromDouble) {
  EXPECT_EQ(bf16(1.0).bits, 0x3f80);
  EXPECT_EQ(bf16(-2.5).bits, 0xc020);
  EXPECT_EQ(static_cast<float>(bf16(1e300)), std::numeric_limits<float>::infinity());
}

TEST(F8e4m3, CodesStandForWhatTheFormatSays) {
  EXPECT_EQ(size_of(DType::f8e4m3), sizeof(f8e4m3));
  EXPECT_FALSE(is_float(DType::f8e4m3)) << "nothing computes in it";
  for (int code = 0; code < 256; ++code) {
    f8e4m3 value;
    value.bits = static_cast<uint8_t>(code);
    const float found = value;
    const double sign = code < 128 ? 1 : -1;
    const int exponent = code / 8 % 16;
    const double mantissa = code % 8 / 8.0;
    EXPECT_EQ(std::signbit(found), code >= 128) << code;
    if (exponent == 15 && code % 8 == 7) {
      EXPECT_TRUE(std::isnan(found)) << code;
    } else if (exponent == 0) {
      EXPECT_EQ(found, sign * mantissa * 0x1p-6) << code;
    } else {
      EXPECT_EQ(found, sign * (1 + mantissa) * std::ldexp(1.0, exponent - 7)) << code;
    }
  }
}

TEST(F8e5m2, CodesStandForWhatTheFormatSays) {
  EXPECT_EQ(size_of(DType::f8e5m2), sizeof(f8e5m2));
  EXPECT_FALSE(is_float(DType::f8e5m2)) << "nothing computes in it";
  for (int code = 0; code < 256; ++code) {
    const float found = f8e5m2{static_cast<uint8_t>(code)};
    const double sign = code < 128 ? 1 : -1;
    const int exponent = code / 4 % 32;
    const double mantissa = code % 4 / 4.0;
    EXPECT_EQ(std::signbit(found), code >= 128) << code;
    if (exponent == 31 && code % 4 != 0) {
      EXPECT_TRUE(std::isnan(found)) << code;
    } else if (exponent == 31) {
      EXPECT_TRUE(std::isinf(found)) << code;
    } else if (exponent == 0) {
      EXPECT_EQ(found, sign * mantissa * 0x1p-14) << code;
    } else {
      EXPECT_EQ(found, sign * (1 + mantissa) * std::ldexp(1.0, exponent - 15)) << code;
    }
  }
}

// The codes of finite numbers without a sign are 0 to `largest`, in the order of the numbers. Finds
// the nearest by comparing distances, which are exact in double.
template <class F8>
int nearest_by_search(double magnitude, int largest) {
  const auto number = [](int code) {
    return static_cast<double>(static_cast<float>(F8{static_cast<uint8_t>(code)}));
  };
  if (magnitude >= number(largest)) return largest;
  int below = 0;
  for (int step = 64; step > 0; step /= 2) {
    if (below + step <= largest && number(below + step) <= magnitude) below += step;
  }
  const double down = magnitude - number(below);
  const double up = number(below + 1) - magnitude;
  if (down != up) return down < up ? below : below + 1;
  return below % 2 == 0 ? below : below + 1;
}

template <class F8>
void expect_nearest(uint32_t bits, int largest) {
  const float value = from_bits(bits);
  const int sign = bits >> 31 != 0 ? 0x80 : 0;
  const int expected =
      std::isnan(value) ? 0x7f : nearest_by_search<F8>(std::fabs(double{value}), largest);
  ASSERT_EQ(F8::nearest(value).bits, sign | expected) << value << " of bits " << bits;
}

template <class F8>
void expect_nearest_everywhere(int largest) {
  for (uint32_t high = 0; high <= 0xffff; ++high) {
    expect_nearest<F8>(high << 16, largest);  // all numbers of bf16
    // Beside them, where ties are just missed, and somewhere between.
    for (const uint32_t low :
         {0x0001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU, (high * 40503U) & 0xffffU}) {
      expect_nearest<F8>(high << 16 | low, largest);
    }
  }
}

TEST(F8e4m3, RoundsToTheNearestAndSaturates) {
  expect_nearest_everywhere<f8e4m3>(0x7e);
  EXPECT_EQ(f8e4m3::nearest(1e30F), 448);
  EXPECT_EQ(f8e4m3::nearest(-std::numeric_limits<float>::infinity()), -448);
  EXPECT_EQ(f8e4m3::nearest(17), 16) << "a tie goes to the even code";
  EXPECT_EQ(f8e4m3::nearest(19), 20);
  EXPECT_EQ(f8e4m3::nearest(0x1p-10F).bits, 0);
}

TEST(F8e5m2, RoundsToTheNearestAndSaturates) {
  expect_nearest_everywhere<f8e5m2>(0x7b);
  EXPECT_EQ(f8e5m2::nearest(std::numeric_limits<float>::infinity()), 57344);
  EXPECT_EQ(f8e5m2::nearest(9), 8) << "a tie goes to the even code";
  EXPECT_EQ(f8e5m2::nearest(11), 12);
}

TEST(F8, EveryNumberComesBack) {
  for (int code = 0; code < 256; ++code) {
    const auto bits = static_cast<uint8_t>(code);
    const float e4m3 = f8e4m3{bits};
    if (!std::isnan(e4m3)) {
      EXPECT_EQ(f8e4m3::nearest(e4m3).bits, bits);
    }
    const float e5m2 = f8e5m2{bits};
    if (std::isfinite(e5m2)) {
      EXPECT_EQ(f8e5m2::nearest(e5m2).bits, bits);
    }
  }
}

TEST(DType, SizesAndTypes) {
  EXPECT_EQ(size_of(DType::f64), sizeof(double));
  EXPECT_EQ(size_of(DType::f32), sizeof(float));
  EXPECT_EQ(size_of(DType::bf16), sizeof(bf16));
  EXPECT_EQ(size_of(DType::i64), sizeof(int64_t));
  EXPECT_EQ(size_of(DType::i32), sizeof(int32_t));
  EXPECT_EQ(size_of(DType::u8), sizeof(uint8_t));
  EXPECT_EQ(accumulation_dtype(DType::f64), DType::f64);
  EXPECT_EQ(accumulation_dtype(DType::f32), DType::f32);
  EXPECT_EQ(accumulation_dtype(DType::bf16), DType::f32);
  EXPECT_TRUE(is_float(DType::bf16));
  EXPECT_FALSE(is_float(DType::i32));
}

}  // namespace
}  // namespace troupe
