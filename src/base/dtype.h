// Element types of tensors, and bfloat16 arithmetic with correct rounding.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace troupe {

// f8e4m3 and f8e5m2 are types of storage only: their numbers belong to a scale, and nothing
// computes in them.
enum class DType : uint8_t { f64, f32, bf16, f8e4m3, f8e5m2, i64, i32, u8 };

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f8e4m3:
      return "f8e4m3";
    case DType::f8e5m2:
      return "f8e5m2";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
  }
  return "?";
}

// Those that operations compute in.
constexpr bool is_float(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16;
}

// Codes of numbers in 8 bits.
constexpr bool is_f8(DType dtype) {
  return dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
}

// Sums of values of this type are kept in this type: f64 for f64, f32 for f32 and bf16.
constexpr DType accumulation_dtype(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

// The upper half of an IEEE float. Conversion from float rounds to nearest, ties to even; NaN stays
// NaN (quiet). Conversion to float is exact.
struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7fffffffU) > 0x7f800000U) {
      bits = static_cast<uint16_t>((word >> 16) | 0x0040U);
    } else {
      bits = static_cast<uint16_t>((word + 0x7fffU + ((word >> 16) & 1U)) >> 16);
    }
  }
  explicit bf16(double value) : bf16(static_cast<float>(value)) {}
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
static_assert(sizeof(bf16) == 2);

// The code of the number nearest to `value` in an 8-bit format, ties to the even code. What is too
// large, infinity with it, becomes the largest number; NaN becomes `nan`. `largest` and `nan` are
// codes without a sign.
template <int kMantissaBits, int kBias>
constexpr uint8_t nearest_f8(float value, uint32_t largest, uint32_t nan) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;  // 2^(1 - bias)
  // Codes without an exponent count in steps of 2^(1 - bias - mantissa bits); a float that large
  // has a last bit worth one such step, and rounds to it.
  constexpr float kOneStep =
      std::bit_cast<float>(static_cast<uint32_t>(151 - kBias - kMantissaBits) << 23);
  const uint32_t word = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = word & 0x7fffffffU;
  uint32_t code = 0;
  if (magnitude > 0x7f800000U) {
    code = nan;
  } else if (magnitude < kSmallestNormal) {
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kOneStep) & 0xffU;
  } else {
    const uint32_t even = magnitude >> kDropped & 1U;
    code = ((magnitude + (1U << (kDropped - 1)) - 1U + even) >> kDropped) -
           (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
    if (code > largest) code = largest;
  }
  return static_cast<uint8_t>(code | (word >> 24 & 0x80U));
}

// A code of the 8-bit format with 4 bits of exponent and 3 of mantissa (Micikevicius et al., "FP8
// formats for deep learning", 2022): bias 7, largest number 448, smallest 2^-9, no infinity, NaN
// where all bits below the sign are ones. Conversion from float rounds to nearest, ties to even,
// and saturates; conversion to float is exact.
struct f8e4m3 {
  static constexpr float kLargest = 448;

  uint8_t bits = 0;

  static constexpr f8e4m3 nearest(float value) { return {nearest_f8<3, 7>(value, 0x7eU, 0x7fU)}; }
  constexpr operator float() const {
    const uint32_t magnitude = bits & 0x7fU;
    // The code's exponent and mantissa stand in a float's place; their biases differ by 120. A code
    // without exponent is a subnormal float, which the product makes normal.
    const uint32_t nan = magnitude == 0x7fU ? 0x7fc00000U : 0U;
    const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | nan |
                                static_cast<uint32_t>(bits & 0x80U) << 24);
  }
};
static_assert(sizeof(f8e4m3) == 1);

// A code of the 8-bit format with 5 bits of exponent and 2 of mantissa, the upper byte of an IEEE
// half: bias 15, largest number 57344, smallest 2^-16. Conversions as of f8e4m3; an infinite code,
// which none of them makes, stays infinite.
struct f8e5m2 {
  static constexpr float kLargest = 57344;

  uint8_t bits = 0;

  static constexpr f8e5m2 nearest(float value) { return {nearest_f8<2, 15>(value, 0x7bU, 0x7fU)}; }
  constexpr operator float() const {
    const uint32_t magnitude = bits & 0x7fU;
    // As above; the biases differ by 112.
    const uint32_t special = magnitude >= 0x7cU ? 0x7f800000U : 0U;
    const float value = std::bit_cast<float>(magnitude << 21) * 0x1p112F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | special |
                                static_cast<uint32_t>(bits & 0x80U) << 24);
  }
};
static_assert(sizeof(f8e5m2) == 1);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<f8e4m3> {
  static constexpr DType value = DType::f8e4m3;
};
template <>
struct DTypeOf<f8e5m2> {
  static constexpr DType value = DType::f8e5m2;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::u8;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

// The C++ type in which sums over T are kept (see accumulation_dtype).
template <class T>
struct AccumulationType {
  using type = float;
};
template <>
struct AccumulationType<double> {
  using type = double;
};
template <class T>
using accumulation_t = typename AccumulationType<T>::type;

}  // namespace troupe
