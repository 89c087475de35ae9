#include "io/hf_quantization.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/dtype.h"
#include "base/error.h"
#include "base/text.h"
#include "io/json.h"

namespace troupe {
namespace {

constexpr int kMaxConfigDepth = 32;
constexpr float kLargestFp8 = 448;
constexpr float kLargestFp4 = 6;
constexpr float kFp4Values[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};

uint32_t bits_of(float value) {
  return std::bit_cast<uint32_t>(value);
}

uint8_t to_fp4(float value) {
  const float magnitude = std::fabs(value);
  size_t code = 0;
  while (code + 1 < std::size(kFp4Values)) {
    const float middle = (kFp4Values[code] + kFp4Values[code + 1]) / 2;
    // A tie goes to the even code.
    if (magnitude < middle || (magnitude == middle && code % 2 == 0)) break;
    ++code;
  }
  return static_cast<uint8_t>(code | (bits_of(value) >> 31) << 3);
}

float fp4_value(uint32_t code) {
  const float magnitude = kFp4Values[code & 7U];
  return (code & 8U) != 0 ? -magnitude : magnitude;
}

float power_of_two(uint8_t scale) {
  if (scale == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0F, scale - 127);
}

// A block of a matrix.
struct WeightBlock {
  const float* values;
  int64_t rows;
  int64_t columns;
  int64_t stride;

  // Does every element satisfy it?
  template <class Predicate>
  bool all(const Predicate& predicate) const {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        if (!predicate(values[row * stride + column])) return false;
      }
    }
    return true;
  }
  float largest() const {
    float largest = 0;
    all([&](float value) {
      largest = std::max(largest, std::fabs(value));
      return true;
    });
    return largest;
  }
};

bool reproduces_fp8(const WeightBlock& block, float scale) {
  if (!(scale > 0) || !std::isfinite(scale)) return false;
  return block.all([&](float value) {
    return bits_of(f8e4m3::nearest(value / scale) * scale) == bits_of(value);
  });
}

float fp8_scale(const WeightBlock& block, const float* hint) {
  if (hint != nullptr && reproduces_fp8(block, *hint)) return *hint;
  const float largest = block.largest();
  if (largest == 0) return 1;
  // The largest code of a block is some number above 224 in the smallest scale that holds it; half
  // the scale would do for the others. The largest element is the rounded product of the two: its
  // quotient is within one step of the scale (half a step of the product is less than one of the
  // quotient).
  for (uint8_t code = 0x7e; code > 0x76; --code) {
    const float near = largest / f8e4m3{code};
    for (const float scale : {near, std::nextafter(near, 0.0F),
                              std::nextafter(near, std::numeric_limits<float>::max())}) {
      if (reproduces_fp8(block, scale)) return scale;
    }
  }
  // A subnormal largest element can have no quotient.
  return std::max(largest / kLargestFp8, std::numeric_limits<float>::denorm_min());
}

bool reproduces_fp4(std::span<const float> group, uint8_t scale) {
  if (scale == 255) return false;
  const double factor = std::ldexp(1.0, scale - 127);
  return std::all_of(group.begin(), group.end(), [&](float value) {
    const auto quotient = static_cast<float>(value / factor);
    return fp4_value(to_fp4(quotient)) * factor == value;
  });
}

uint8_t fp4_scale(std::span<const float> group, const uint8_t* hint) {
  if (hint != nullptr && reproduces_fp4(group, *hint)) return *hint;
  float largest = 0;
  for (const float value : group) largest = std::max(largest, std::fabs(value));
  if (largest == 0) return 127;
  // Where any scale reproduces the group, this, the least that holds its largest element, does.
  int exponent = 0;
  const double fraction = std::frexp(static_cast<double>(largest) / kLargestFp4, &exponent);
  if (fraction == 0.5) --exponent;
  return static_cast<uint8_t>(std::clamp(exponent + 127, 0, 254));
}

}  // namespace

HfQuantization parse_hf_quantization(const std::string& config_json, const std::string& where) {
  const nlohmann::json document = parse_json(config_json, where, kMaxConfigDepth);
  const auto found = document.find("quantization_config");
  if (found == document.end() || found->is_null()) return HfQuantization::none;
  const auto refuse = [&](const std::string& field, const std::string& supported) {
    throw_bad_request(fmt::format(
        "{}: the field \"quantization_config\" has {}; supported are {}. Convert the folder to "
        "bf16 with the program that quantised it.",
        where, field, supported));
  };
  const auto field = [&](const char* name) {
    const auto value = found->is_object() ? found->find(name) : found->end();
    return value == found->end() ? nlohmann::json() : *value;
  };
  const auto quoted = [&](const char* name) {
    return fmt::format("\"{}\": {}", name, printable(field(name).dump()));
  };
  const nlohmann::json method = field("quant_method");
  if (method == "mxfp4") return HfQuantization::mxfp4;
  if (method != "fp8") refuse(quoted("quant_method"), "\"fp8\" and \"mxfp4\"");
  // MiniMax-M2 has PyTorch's name of the same type.
  const nlohmann::json format = field("fmt");
  if (!format.is_null() && format != "e4m3" && format != "float8_e4m3fn") {
    refuse(quoted("fmt"), "\"e4m3\" and \"float8_e4m3fn\"");
  }
  if (field("weight_block_size") != nlohmann::json::array({kFp8Block, kFp8Block})) {
    refuse(quoted("weight_block_size"), "[128, 128]");
  }
  return HfQuantization::fp8_block;
}

void dequantise_fp8(const std::byte* codes, const std::byte* scales, int64_t columns, int64_t first,
                    int64_t count, float* values) {
  const int64_t blocks = fp8_blocks(columns);
  for (int64_t i = 0; i < count;) {
    const int64_t row = (first + i) / columns;
    const int64_t column = (first + i) % columns;
    // As far as one scale goes.
    const int64_t end = i + std::min({count - i, columns - column, kFp8Block - column % kFp8Block});
    float scale = 0;
    std::memcpy(
        &scale,
        scales + static_cast<size_t>(row / kFp8Block * blocks + column / kFp8Block) * sizeof scale,
        sizeof scale);
    for (; i < end; ++i) values[i] = f8e4m3{static_cast<uint8_t>(codes[first + i])} * scale;
  }
}

void quantise_fp8(std::span<const float> values, int64_t columns, std::span<const float> hints,
                  std::span<uint8_t> codes, std::span<float> scales) {
  const int64_t rows = columns == 0 ? 0 : static_cast<int64_t>(values.size()) / columns;
  size_t number = 0;
  for (int64_t top = 0; top < rows; top += kFp8Block) {
    for (int64_t left = 0; left < columns; left += kFp8Block, ++number) {
      const int64_t corner = top * columns + left;
      const WeightBlock block = {values.data() + corner, std::min(kFp8Block, rows - top),
                                 std::min(kFp8Block, columns - left), columns};
      const float scale = fp8_scale(block, hints.empty() ? nullptr : &hints[number]);
      scales[number] = scale;
      for (int64_t row = 0; row < block.rows; ++row) {
        for (int64_t i = corner + row * columns; i < corner + row * columns + block.columns; ++i) {
          codes[static_cast<size_t>(i)] =
              f8e4m3::nearest(values[static_cast<size_t>(i)] / scale).bits;
        }
      }
    }
  }
}

void dequantise_mxfp4(const std::byte* codes, const std::byte* scales, int64_t first, int64_t count,
                      float* values) {
  for (int64_t i = 0; i < count;) {
    const int64_t at = first + i;
    const int64_t end = i + std::min(count - i, kMxfp4Group - at % kMxfp4Group);
    const float scale = power_of_two(static_cast<uint8_t>(scales[at / kMxfp4Group]));
    for (; i < end; ++i) {
      const auto pair = static_cast<uint32_t>(codes[(first + i) / 2]);
      values[i] = fp4_value((first + i) % 2 == 0 ? pair & 15U : pair >> 4) * scale;
    }
  }
}

void quantise_mxfp4(std::span<const float> values, std::span<const uint8_t> hints,
                    std::span<uint8_t> codes, std::span<uint8_t> scales) {
  constexpr auto kGroup = static_cast<size_t>(kMxfp4Group);
  for (size_t number = 0; number < scales.size(); ++number) {
    const auto group = values.subspan(number * kGroup, kGroup);
    scales[number] = fp4_scale(group, hints.empty() ? nullptr : &hints[number]);
    const double factor = std::ldexp(1.0, scales[number] - 127);
    const auto code = [&](size_t i) { return to_fp4(static_cast<float>(group[i] / factor)); };
    for (size_t i = 0; i < kGroup; i += 2) {
      codes[(number * kGroup + i) / 2] = static_cast<uint8_t>(code(i) | code(i + 1) << 4);
    }
  }
}

}  // namespace troupe
