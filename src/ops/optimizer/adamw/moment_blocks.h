// AdamW's moments in 8 bits: codes of f8e4m3 beside a scale for each block of 32 successive
// elements of the last dimension (the last block of a vector may be shorter), which is a power of
// two. A tensor [.., C] has scales [.., ceil(C / 32)], u8.
//
//   element = scale of its block * code           scale = 2^(s - 127), or 0 where s is 0
//
// Of the mean gradient the elements are kept, of the mean squared gradient the square roots: the
// codes reach from 2^-9 to 448, so that a block holds numbers 2^17 apart, and squares 2^35.
//
// Which block an element is in follows from its place in the whole tensor, as long as no layout
// cuts a vector within a block; so a layout changes no number. The scale is the least that gives
// the largest element of the block a code. An element lies between two codes; which one it becomes
// is drawn, so that the expected value is the element itself. Rounding to the nearest code would
// let a moment stand still: one update moves the mean square by at most the 1 - beta2 part of it
// towards the new square, and its root by half of that, where the nearest other code is 1/16 to 1/8
// away; the root would stay where it is until a gradient ten times as large came, and never fall.
// What is drawn is a pure function of the number of the update and of the element's place in its
// block (Philox, base/random.h), the same under every layout. It costs nothing that grows with the
// tensor.
//
// Errors, with d the relative distance between two codes, 1/16 to 1/8 (more below 2^-6 of the
// scale, where codes are 2^-9 of it apart): one rounding moves an element by less than d, without
// bias. Roundings of many updates add up to a standard deviation of about sqrt(d) / 2 of the root,
// 12 to 18 %, whatever beta2 is: each update moves the root by about (1 - beta2) / 2 of it, which
// adds (1 - beta2) d / 2 to the relative variance, of which 2 (1 - beta2) are forgotten. The same
// variance enters the square, which is d / 2 too large, and the root with it 2 to 3 %. (Measured
// with normal gradients: deviation 14 %, root 2.5 % too large; mean gradient off by 8 %.)
//
// A positive root never becomes 0, which would leave AdamW dividing by epsilon: it becomes the
// smallest code, so that elements under 2^-17 of the largest in their block change more slowly than
// they would. An infinite element stays infinite and NaN stays NaN; both take their block with
// them.
//
// Pure functions; any thread, and kernels on a GPU.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"

namespace troupe {

inline constexpr int64_t kMomentBlock = 32;

constexpr int64_t moment_blocks(int64_t columns) {
  return (columns + kMomentBlock - 1) / kMomentBlock;
}

// Of the scales of moments of shape `shape`, which has two dimensions or more.
inline Shape moment_scales_shape(const Shape& shape) {
  std::vector<int64_t> extents;
  for (int i = 0; i + 1 < shape.rank(); ++i) extents.push_back(shape[i]);
  extents.push_back(moment_blocks(shape.back()));
  return Shape(extents);
}

// The number of a draw: of which moment it is.
enum class MomentDraw : uint32_t { mean = 0, square = 1 };

// The scale that `s` stands for: s is the exponent of a float.
constexpr float moment_scale(uint8_t s) {
  return std::bit_cast<float>(static_cast<uint32_t>(s) << 23);
}

// 1 / moment_scale(s), for s from 1 to 253.
constexpr float inverse_moment_scale(uint8_t s) {
  return std::bit_cast<float>((254U - s) << 23);
}

// The s of a block, from 1 to 253, given the bits of the magnitude of its largest element, the
// largest such bits. The largest code is 1.75 * 2^8.
constexpr uint8_t moment_scale_of(uint32_t largest) {
  const uint32_t exponent = largest >> 23;
  if (exponent == 255) return 253;
  const uint32_t above = (largest & 0x7fffffU) > 0x600000U ? 1 : 0;
  return static_cast<uint8_t>(exponent + above > 9 ? exponent + above - 8 : 1);
}

// The code of a magnitude that has been divided by its scale: the one below it or the one above it.
// `draw`, 20 random bits, decides: the upper one with the probability that the expected value asks
// for, to 2^-20 of the distance.
constexpr uint8_t draw_e4m3(float magnitude, uint32_t draw) {
  // Without branches, for vector registers. Below 2^-6 two codes are 2^-9 apart, which is 2^20 in
  // units of 2^-29; above, 2^20 in the bits of a float.
  const float small = magnitude < 0x1p-6F ? magnitude : 0x1p-6F;
  const auto units = static_cast<uint32_t>(static_cast<int32_t>(small * 0x1p29F));
  const uint32_t word = std::bit_cast<uint32_t>(magnitude);
  const uint32_t code = magnitude < 0x1p-6F ? (units + draw) >> 20 : ((word + draw) >> 20) - 960U;
  const uint32_t finite = code < 0x7eU ? code : 0x7eU;
  return static_cast<uint8_t>(word > 0x7f800000U ? 0x7fU : finite);
}

}  // namespace troupe
