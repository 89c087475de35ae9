// Element types of tensors, and bfloat16 arithmetic with correct rounding.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace troupe {

// f8e4m3 is a type of storage only: its numbers belong to a scale, and nothing computes in it.
enum class DType : uint8_t { f64, f32, bf16, f8e4m3, i64, i32, u8 };

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

// A code of the 8-bit format with 4 bits of exponent and 3 of mantissa (Micikevicius et al., "FP8
// formats for deep learning", 2022): bias 7, largest number 448, smallest 2^-9, no infinity, NaN
// where all bits below the sign are ones. Conversion to float is exact.
struct f8e4m3 {
  uint8_t bits = 0;

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
