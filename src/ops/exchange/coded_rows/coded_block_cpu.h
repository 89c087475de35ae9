// Coded rows (coded_block.h) on the CPU, a block or a row at a time, for kernels.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "ops/cpu/vector.h"
#include "ops/exchange/coded_rows/coded_block.h"
#include "ops/precision/scale_blocks.h"

namespace troupe {

// A block in 8 bits.
struct CodedBlock {
  std::array<uint8_t, kCodedBlock> codes;  // e4m3
  uint8_t scale;
};

template <class T>
CodedBlock encode_block(const T* x) {
  std::array<float, kCodedBlock> values;
  uint32_t largest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(widen(x[i]));
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffU);
  }
  CodedBlock block;
  block.scale = scale_exponent(largest);
  const float factor = 1 / exponent_scale(block.scale);
  for (size_t i = 0; i < values.size(); ++i)
    block.codes[i] = f8e4m3::nearest(values[i] * factor).bits;
  return block;
}

template <class T>
void decode_block(const uint8_t* codes, uint8_t scale, T* y) {
  using A = accumulation_t<T>;
  for (int64_t i = 0; i < kCodedBlock; ++i) {
    y[i] = T(static_cast<A>(static_cast<float>(f8e4m3{codes[i]})) *
             static_cast<A>(exponent_scale(scale)));
  }
}

template <class T>
void encode_row(const T* x, int64_t elements, uint8_t* coded) {
  uint8_t* scales = coded + elements;
  for (int64_t first = 0; first < elements; first += kCodedBlock) {
    const CodedBlock block = encode_block(x + first);
    coded = std::copy(block.codes.begin(), block.codes.end(), coded);
    *scales++ = block.scale;
  }
  std::fill_n(scales, coded_row_bytes(elements) - elements - elements / kCodedBlock, uint8_t{0});
}

template <class T>
void decode_row(const uint8_t* coded, int64_t elements, T* y) {
  const uint8_t* scales = coded + elements;
  for (int64_t first = 0; first < elements; first += kCodedBlock) {
    decode_block(coded + first, *scales++, y + first);
  }
}

}  // namespace troupe
