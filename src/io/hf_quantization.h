// Weights of Hugging Face folders in 8 and 4 bits: which of the two forms a folder has, and the
// arithmetic between codes with scales and f32.
//
// fp8 (DeepSeek-V3): a matrix of e4m3 codes, and for each block of 128 x 128 (smaller at the lower
// and right borders) a scale, in f32, bf16 or f16; a weight is the product of the two, rounded to
// f32.
// mxfp4 (GPT-OSS): of every 32 successive elements of a row, codes of 4 bits (e2m1: a sign and 0,
// 0.5, 1, 1.5, 2, 3, 4, 6), the even element in the low half of its byte, and a byte e that scales
// by 2^(e - 127), 255 being NaN. A weight is the product, exact in f32 and in bf16 unless
// subnormal.
//
// Quantising takes for each block the first scale that reproduces every element bit for bit: the
// one of `hints` (of the tensor that the weights came from; may be empty), then the smallest
// possible scales. Where none does, because the weights have changed, the scale is amax / 448 in
// fp8 and the least power of two >= amax / 6 in mxfp4, and elements are rounded to nearest, ties to
// even. A block of zeros gets the scale 1 unless the hint says another. Values must be finite.
//
// Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "io/file_dtype.h"

namespace troupe {

enum class HfQuantization : uint8_t { none, fp8_block, mxfp4 };

// What weights are written as.
struct HfWeightType {
  std::optional<FileDType> dtype = {};  // of tensors that are not quantised; unset: the model's
  HfQuantization quantization = HfQuantization::none;

  bool operator==(const HfWeightType& other) const = default;
};

inline constexpr int64_t kFp8Block = 128;   // rows and columns
inline constexpr int64_t kMxfp4Group = 32;  // elements of a row

// What the "quantization_config" of a config.json says: none without the field. A method, format or
// block size that Troupe does not read is a bad request (UserError). Takes the text of the file;
// `where` names it in messages.
HfQuantization parse_hf_quantization(const std::string& config_json, const std::string& where);

// The number of scales of `elements` rows or columns.
constexpr int64_t fp8_blocks(int64_t elements) {
  return (elements + kFp8Block - 1) / kFp8Block;
}

// Elements [first, first + count) of a row-major matrix of `columns` columns. `codes` and `scales`
// (f32 without alignment) are of the whole matrix.
void dequantise_fp8(const std::byte* codes, const std::byte* scales, int64_t columns, int64_t first,
                    int64_t count, float* values);

// `values` and `codes`: rows x columns. `scales` and `hints`: one for each block, row-major.
void quantise_fp8(std::span<const float> values, int64_t columns, std::span<const float> hints,
                  std::span<uint8_t> codes, std::span<float> scales);

// Elements [first, first + count) of rows that follow each other and are multiples of 32 long.
void dequantise_mxfp4(const std::byte* codes, const std::byte* scales, int64_t first, int64_t count,
                      float* values);

// `values`: a multiple of 32. `codes`: half as many. `scales` and `hints`: one for every 32.
void quantise_mxfp4(std::span<const float> values, std::span<const uint8_t> hints,
                    std::span<uint8_t> codes, std::span<uint8_t> scales);

}  // namespace troupe
