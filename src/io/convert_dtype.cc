#include "io/convert_dtype.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"

namespace troupe {
namespace {

// Rounded "to odd": towards zero, with the last bit set when anything was lost. A float has at
// least two more bits than the narrower types, so a second rounding then sees on which side of a
// tie the double lies and its result is that of one rounding (Boldo and Melquiond, 2005).
float rounded_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(nearest) == value) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;
  return std::bit_cast<float>(bits | 1U);
}

template <class From, class To>
To convert_one(From value) {
  if constexpr (std::is_same_v<From, To>) {
    return value;
  } else if constexpr (std::is_same_v<From, double> && std::is_same_v<To, bf16>) {
    return double_to_bf16(value);
  } else if constexpr (std::is_same_v<From, double> && std::is_same_v<To, f16>) {
    return f16(rounded_to_odd(value));
  } else if constexpr (std::is_same_v<From, bf16> || std::is_same_v<From, f16>) {
    return To(static_cast<float>(value));
  } else {
    return To(value);
  }
}

// memcpy is the portable unaligned load and store; compilers turn it into one instruction.
template <class From, class To>
void convert_all(const void* source, void* target, int64_t count) {
  const auto* from = static_cast<const unsigned char*>(source);
  auto* to = static_cast<unsigned char*>(target);
  for (int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + static_cast<size_t>(i) * sizeof(From), sizeof(From));
    const To result = convert_one<From, To>(value);
    std::memcpy(to + static_cast<size_t>(i) * sizeof(To), &result, sizeof(To));
  }
}

template <class From>
void convert_from(const void* source, FileDType to, void* target, int64_t count) {
  switch (to) {
    case FileDType::f64:
      return convert_all<From, double>(source, target, count);
    case FileDType::f32:
      return convert_all<From, float>(source, target, count);
    case FileDType::bf16:
      return convert_all<From, bf16>(source, target, count);
    case FileDType::f16:
      return convert_all<From, f16>(source, target, count);
    case FileDType::f8e4m3:
    case FileDType::i64:
    case FileDType::i32:
    case FileDType::u8:
      break;
  }
  TROUPE_CHECK(false, "not a floating-point type");
}

// Infinities and NaN are the numbers whose exponent is all ones.
template <class Bits, Bits kExponent>
int64_t first_with_exponent(const void* data, int64_t count) {
  constexpr int64_t kBlock = 4096;  // searched only where something is found
  const auto* bytes = static_cast<const unsigned char*>(data);
  const auto is_hit = [&](int64_t i) {
    Bits bits;
    std::memcpy(&bits, bytes + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
    return (bits & kExponent) == kExponent;
  };
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    bool any = false;
    for (int64_t i = begin; i < end; ++i) any |= is_hit(i);
    if (!any) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (is_hit(i)) return i;
    }
  }
  return -1;
}

bool is_float(FileDType dtype) {
  return is_float(to_dtype(dtype));
}

}  // namespace

bool can_convert(FileDType from, FileDType to) {
  return from == to || (is_float(from) && is_float(to));
}

bool can_convert(FileDType from, DType to) {
  return can_convert(from, to_file_dtype(to));
}

int64_t first_not_finite(FileDType dtype, const void* data, int64_t count) {
  switch (dtype) {
    case FileDType::f64:
      return first_with_exponent<uint64_t, 0x7ff0'0000'0000'0000U>(data, count);
    case FileDType::f32:
      return first_with_exponent<uint32_t, 0x7f80'0000U>(data, count);
    case FileDType::bf16:
      return first_with_exponent<uint16_t, 0x7f80U>(data, count);
    case FileDType::f16:
      return first_with_exponent<uint16_t, 0x7c00U>(data, count);
    case FileDType::f8e4m3:
    case FileDType::i64:
    case FileDType::i32:
    case FileDType::u8:
      break;
  }
  TROUPE_CHECK(false, "not a floating-point type");
}

int64_t first_not_finite(DType dtype, const void* data, int64_t count) {
  return first_not_finite(to_file_dtype(dtype), data, count);
}

bf16 double_to_bf16(double value) {
  return bf16(rounded_to_odd(value));
}

void convert_elements(FileDType from, const void* source, DType to, void* target, int64_t count) {
  convert_elements(from, source, to_file_dtype(to), target, count);
}

void convert_elements(FileDType from, const void* source, FileDType to, void* target,
                      int64_t count) {
  TROUPE_CHECK(
      count >= 0 && can_convert(from, to),
      "no conversion from " + std::string(name_of(from)) + " to " + std::string(name_of(to)));
  if (count == 0) return;
  if (from == to) {
    std::memcpy(target, source, static_cast<size_t>(count) * size_of(to));
    return;
  }
  switch (from) {
    case FileDType::f64:
      return convert_from<double>(source, to, target, count);
    case FileDType::f32:
      return convert_from<float>(source, to, target, count);
    case FileDType::bf16:
      return convert_from<bf16>(source, to, target, count);
    case FileDType::f16:
      return convert_from<f16>(source, to, target, count);
    case FileDType::f8e4m3:
    case FileDType::i64:
    case FileDType::i32:
    case FileDType::u8:
      break;
  }
  TROUPE_CHECK(false, "not a floating-point type");
}

}  // namespace troupe
