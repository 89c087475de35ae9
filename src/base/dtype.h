// Element types of tensors, and conversions to the narrow ones with correct rounding.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace troupe {

// f8e4m3 and f8e5m2 are types of storage only: their numbers belong to a scale, and nothing
// computes in them.
enum class DType : uint8_t { f64, f32, bf16, f16, f8e4m3, f8e5m2, i64, i32, u8 };

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
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
    case DType::f16:
      return "f16";
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

// Those of two bytes: sums are f32, and so are the master weights of parameters.
constexpr bool is_half(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::f16;
}

// Those that operations compute in.
constexpr bool is_float(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || is_half(dtype);
}

// Codes of numbers in 8 bits.
constexpr bool is_f8(DType dtype) {
  return dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
}

// Sums of values of this type are kept in this type: f64 for f64, f32 for f32, bf16 and f16.
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

// The code of the number nearest to `value` in a format of at most 16 bits, ties to the even code.
// What is too large, infinity with it, becomes `largest`, the last number or infinity; NaN becomes
// `nan`. Both are codes without a sign.
template <class Code, int kMantissaBits, int kBias>
constexpr Code nearest_code(float value, uint32_t largest, uint32_t nan) {
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
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kOneStep) & 0x7fffU;
  } else {
    const uint32_t even = magnitude >> kDropped & 1U;
    code = ((magnitude + (1U << (kDropped - 1)) - 1U + even) >> kDropped) -
           (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
    if (code > largest) code = largest;
  }
  constexpr int kSign = 8 * sizeof(Code) - 1;
  return static_cast<Code>(code | word >> 31 << kSign);
}

// IEEE half precision: 5 bits of exponent, 10 of mantissa; largest number 65504, smallest 2^-24.
// Conversion from float rounds to nearest, ties to even; what rounds to more than 65504 becomes
// infinite. Conversion to float is exact.
struct f16 {
  uint16_t bits = 0;

  f16() = default;
  explicit f16(float value) : bits(nearest_code<uint16_t, 10, 15>(value, 0x7c00U, 0x7e00U)) {}
  explicit f16(double value) : f16(static_cast<float>(value)) {}
  constexpr operator float() const {
    const uint32_t magnitude = bits & 0x7fffU;
    // The code's exponent and mantissa stand in a float's place; their biases differ by 112. A code
    // without exponent is a subnormal float, which the product makes normal.
    const uint32_t special = magnitude >= 0x7c00U ? 0x7f800000U : 0U;
    const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | special |
                                static_cast<uint32_t>(bits & 0x8000U) << 16);
  }
};
static_assert(sizeof(f16) == 2);

// A code of the 8-bit format with 4 bits of exponent and 3 of mantissa (Micikevicius et al., "FP8
// formats for deep learning", 2022): bias 7, largest number 448, smallest 2^-9, no infinity, NaN
// where all bits below the sign are ones. Conversion from float rounds to nearest, ties to even,
// and saturates; conversion to float is exact.
struct f8e4m3 {
  static constexpr float kLargest = 448;

  uint8_t bits = 0;

  static constexpr f8e4m3 nearest(float value) {
    return {nearest_code<uint8_t, 3, 7>(value, 0x7eU, 0x7fU)};
  }
  constexpr operator float() const {
    const uint32_t magnitude = bits & 0x7fU;
    // As of f16; the biases differ by 120.
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

  static constexpr f8e5m2 nearest(float value) {
    return {nearest_code<uint8_t, 2, 15>(value, 0x7bU, 0x7fU)};
  }
  constexpr operator float() const {
    f16 half;
    half.bits = static_cast<uint16_t>(bits << 8);
    return half;
  }
};
static_assert(sizeof(f8e5m2) == 1);

template <class T>
inline constexpr DType dtype_of = [] {
  if constexpr (std::is_same_v<T, double>) return DType::f64;
  if constexpr (std::is_same_v<T, float>) return DType::f32;
  if constexpr (std::is_same_v<T, bf16>) return DType::bf16;
  if constexpr (std::is_same_v<T, f16>) return DType::f16;
  if constexpr (std::is_same_v<T, f8e4m3>) return DType::f8e4m3;
  if constexpr (std::is_same_v<T, f8e5m2>) return DType::f8e5m2;
  if constexpr (std::is_same_v<T, int64_t>) return DType::i64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::i32;
  if constexpr (std::is_same_v<T, uint8_t>) return DType::u8;
}();

// The C++ type in which sums over T are kept (see accumulation_dtype).
template <class T>
using accumulation_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace troupe
