#include "io/convert_dtype.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "io/io_test_support.h"

namespace troupe {
namespace {

// The nearest value with 8 significant bits and bf16's exponent range, by arithmetic on doubles
// that is exact here: an independent statement of what rounding means.
float rounded_to_bf16(double value) {
  if (std::isnan(value) || std::isinf(value) || value == 0) return static_cast<float>(value);
  int exponent = 0;
  std::frexp(value, &exponent);
  const int last_place = std::max(exponent - 8, -133);
  // nearbyint rounds to nearest, ties to even.
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -last_place)), last_place);
  return std::fabs(rounded) >= 0x1p128
             ? std::copysign(std::numeric_limits<float>::infinity(), value)
             : static_cast<float>(rounded);
}

TEST(ConvertDtype, DoublesRoundToBf16InOneStep) {
  // Half an ulp of 1.0 in bf16 is 2^-8. One rounding must see the last bit of the double; rounding
  // to f32 first would lose it and then break the tie to even.
  EXPECT_EQ(static_cast<float>(double_to_bf16(1.0 + 0x1p-8)), 1.0F);
  EXPECT_EQ(static_cast<float>(double_to_bf16(1.0 + 0x1p-8 + 0x1p-52)), 1.0F + 0x1p-7F);
  EXPECT_EQ(static_cast<float>(double_to_bf16(1.0 + 0x1p-8 - 0x1p-52)), 1.0F);
  EXPECT_EQ(static_cast<float>(double_to_bf16(1.0 + 3 * 0x1p-8 - 0x1p-52)), 1.0F + 0x1p-7F);
  EXPECT_EQ(static_cast<float>(double_to_bf16(-(1.0 + 0x1p-8 + 0x1p-40))), -1.0F - 0x1p-7F);
}

TEST(ConvertDtype, ElementsRoundInOneStep) {
  const std::vector<double> from = {1.0 + 0x1p-8 + 0x1p-52, 1.0 + 3 * 0x1p-8 - 0x1p-52};
  std::vector<bf16> to(from.size());
  convert_elements(FileDType::f64, from.data(), DType::bf16, to.data(), 2);
  EXPECT_EQ(static_cast<float>(to[0]), 1.0F + 0x1p-7F);
  EXPECT_EQ(static_cast<float>(to[1]), 1.0F + 0x1p-7F);
}

TEST(ConvertDtype, DoublesOfAllMagnitudesMatchTheDefinitionOfRounding) {
  uint64_t state = 1;
  const auto next = [&] { return state = state * 6364136223846793005U + 1442695040888963407U; };
  for (int i = 0; i < 200'000; ++i) {
    // Exponents from below the smallest subnormal to beyond the largest number of bf16; mantissas
    // either arbitrary or next to a tie.
    const uint64_t exponent = 1023 - 145 + next() % 280;
    uint64_t mantissa = next() >> 12;
    if (i % 2 == 0)
      mantissa = (mantissa >> 44 << 44) + (next() >> 63) * 3 + (uint64_t{1} << 44) - 1;
    mantissa &= (uint64_t{1} << 52) - 1;
    const auto value = std::bit_cast<double>((next() >> 63) << 63 | exponent << 52 | mantissa);
    const auto converted = static_cast<float>(double_to_bf16(value));
    ASSERT_EQ(std::bit_cast<uint32_t>(converted), std::bit_cast<uint32_t>(rounded_to_bf16(value)))
        << std::hexfloat << value;
  }
}

float as_float(uint16_t bits) {
  f16 half;
  half.bits = bits;
  return half;
}

// Every half, and what lies between it and the next one.
TEST(ConvertDtype, FloatsRoundToTheNearestHalf) {
  constexpr uint16_t kInfinity = 0x7c00;
  for (uint16_t bits = 0; bits < kInfinity; ++bits) {
    const float value = as_float(bits);
    ASSERT_EQ(f16(value).bits, bits);
    ASSERT_EQ(f16(-value).bits, bits | 0x8000);
    const auto next = static_cast<uint16_t>(bits + 1);
    // Beyond the largest half the tie is where the next one would be.
    const float above = next == kInfinity ? 65536.0F : as_float(next);
    const float tie = (value + above) / 2;  // exact: floats have 13 more bits
    const uint16_t even = bits % 2 == 0 ? bits : next;
    ASSERT_EQ(f16(tie).bits, even);
    ASSERT_EQ(f16(std::nextafter(tie, 0.0F)).bits, bits);
    ASSERT_EQ(f16(std::nextafter(tie, 1e9F)).bits, next);
  }
  EXPECT_EQ(f16(std::numeric_limits<float>::infinity()).bits, kInfinity);
  EXPECT_EQ(f16(-1e30F).bits, 0x8000 | kInfinity);
  EXPECT_TRUE(std::isnan(static_cast<float>(f16(std::nanf("")))));
  EXPECT_EQ(f16(1e-30F).bits, 0);
  // A double in one rounding: just above a tie that a float would fall on.
  const double above_tie = 1.0 + 0x1p-11 + 0x1p-40;
  uint16_t half = 0;
  convert_elements(FileDType::f64, &above_tie, FileDType::f16, &half, 1);
  EXPECT_EQ(as_float(half), 1.0F + 0x1p-10F);
}

TEST(ConvertDtype, SpecialValuesSurvive) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(static_cast<float>(double_to_bf16(infinity)), std::numeric_limits<float>::infinity());
  EXPECT_EQ(static_cast<float>(double_to_bf16(-1e300)), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(static_cast<float>(double_to_bf16(std::nan("")))));
  EXPECT_EQ(double_to_bf16(-0.0).bits, 0x8000);
  EXPECT_EQ(double_to_bf16(-1e-300).bits, 0x8000);
}

TEST(ConvertDtype, EveryHalfIsExact) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint32_t exponent = bits >> 10 & 31;
    const uint32_t mantissa = bits & 1023;
    const float value = as_float(static_cast<uint16_t>(bits));
    ASSERT_EQ(std::signbit(value), bits >= 0x8000) << bits;
    if (exponent == 31) {
      ASSERT_EQ(std::isnan(value), mantissa != 0) << bits;
      ASSERT_EQ(std::isinf(value), mantissa == 0) << bits;
    } else {
      // IEEE 754: 2^(e-15) (1 + m/1024), or 2^-14 m/1024 for e = 0.
      const double expected = exponent == 0
                                  ? std::ldexp(mantissa, -24)
                                  : std::ldexp(1024 + mantissa, static_cast<int>(exponent) - 25);
      ASSERT_EQ(std::fabs(static_cast<double>(value)), expected) << bits;
    }
  }
}

TEST(ConvertDtype, BuffersOfEveryPairOfFloatTypes) {
  const std::vector<double> values = {0.0, 1.5, -2.0, 0.0078125, 240.0, -1e-3};
  const FileDType sources[] = {FileDType::f64, FileDType::f32, FileDType::bf16, FileDType::f16};
  const DType targets[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
  for (const FileDType from : sources) {
    // Odd addresses: files guarantee no alignment.
    std::vector<unsigned char> source(values.size() * size_of(from) + 1);
    convert_elements(FileDType::f64, values.data(), to_dtype(from), source.data() + 1,
                     static_cast<int64_t>(values.size()));
    for (const DType to : targets) {
      std::vector<unsigned char> target(values.size() * size_of(to) + 1);
      convert_elements(from, source.data() + 1, to, target.data() + 1,
                       static_cast<int64_t>(values.size()));
      std::vector<double> back(values.size());
      convert_elements(to_file_dtype(to), target.data() + 1, DType::f64, back.data(),
                       static_cast<int64_t>(values.size()));
      for (size_t i = 0; i < values.size(); ++i) {
        // All but the last value are exact in every type; that one has a relative error of at most
        // half an ulp of bf16, 2^-9, and widening never changes it again.
        const double tolerance = std::fabs(values[i]) * 0x1p-9;
        EXPECT_NEAR(back[i], values[i], i + 1 < values.size() ? 0.0 : tolerance)
            << name_of(from) << " to " << name_of(to);
      }
    }
  }
}

TEST(ConvertDtype, HalvesConvertToEveryFloatType) {
  const uint16_t source[] = {0x3c00, 0xc000, 0x3555};  // 1, -2, about 1/3
  double f64[3];
  float f32[3];
  bf16 b16[3];
  convert_elements(FileDType::f16, source, DType::f64, f64, 3);
  convert_elements(FileDType::f16, source, DType::f32, f32, 3);
  convert_elements(FileDType::f16, source, DType::bf16, b16, 3);
  EXPECT_EQ(f64[1], -2.0);
  EXPECT_EQ(f64[2], 0x1.554p-2);
  EXPECT_EQ(f32[2], 0x1.554p-2F);
  EXPECT_EQ(static_cast<float>(b16[2]), 0x1.56p-2F);
}

TEST(ConvertDtype, SameTypesKeepTheirBits) {
  const uint32_t nan_bits[] = {0x7f800001, 0xffc00123};
  uint32_t copy[2] = {};
  convert_elements(FileDType::f32, nan_bits, DType::f32, copy, 2);
  EXPECT_EQ(std::memcmp(nan_bits, copy, sizeof copy), 0);
  const int64_t integers[] = {-1, std::numeric_limits<int64_t>::min()};
  int64_t integer_copy[2] = {};
  convert_elements(FileDType::i64, integers, DType::i64, integer_copy, 2);
  EXPECT_EQ(integer_copy[1], integers[1]);
}

TEST(ConvertDtype, IntegersConvertOnlyToThemselves) {
  EXPECT_TRUE(can_convert(FileDType::i32, DType::i32));
  EXPECT_FALSE(can_convert(FileDType::i32, DType::i64));
  EXPECT_FALSE(can_convert(FileDType::i64, DType::f64));
  EXPECT_FALSE(can_convert(FileDType::f32, DType::u8));
  EXPECT_TRUE(can_convert(FileDType::f16, DType::bf16));
}

template <class T>
void expect_first_not_finite(DType dtype, T finite, T infinite, T nan) {
  // Longer than a block, and not aligned.
  constexpr int64_t kCount = 10'001;
  std::vector<unsigned char> memory(1 + kCount * sizeof(T));
  unsigned char* data = memory.data() + 1;
  const auto put = [&](int64_t i, T value) {
    std::memcpy(data + static_cast<size_t>(i) * sizeof(T), &value, sizeof value);
  };
  for (int64_t i = 0; i < kCount; ++i) put(i, finite);
  EXPECT_EQ(first_not_finite(dtype, data, kCount), -1);
  EXPECT_EQ(first_not_finite(dtype, data, 0), -1);
  for (const int64_t at : {kCount - 1, int64_t{4096}, int64_t{4095}, int64_t{0}}) {
    put(at, at % 2 == 0 ? infinite : nan);
    EXPECT_EQ(first_not_finite(dtype, data, kCount), at);
    EXPECT_EQ(first_not_finite(dtype, data, at), -1);
  }
}

TEST(ConvertDtype, ValuesThatAreNotFiniteAreFound) {
  using Double = std::numeric_limits<double>;
  using Float = std::numeric_limits<float>;
  expect_first_not_finite(DType::f64, -Double::max(), -Double::infinity(), Double::quiet_NaN());
  expect_first_not_finite(DType::f32, -Float::max(), -Float::infinity(), Float::quiet_NaN());
  // 0x7f7f is the largest bf16.
  expect_first_not_finite<uint16_t>(DType::bf16, 0xff7f, 0xff80, 0x7fc0);
}

}  // namespace
}  // namespace troupe
