// NVFP4: numbers in 4 bits, E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), a scale in E4M3
// for each block and one in f32 for each matrix (NVIDIA, "Pretraining large language models with
// NVFP4", 2025; the blocks and order of Transformer Engine's recipe):
//
//   encode = 448 * 6 / largest of the matrix            f32; 1 where that is 0 or not finite
//   s      = nearest E4M3 of largest of the block / 6 * encode
//   code   = E2M1 of x * encode / s, nearest with ties to even, or stochastic; at most 6
//
// and a code stands for code * (s / encode). The 16 codes are numbers of E4M3, and kept as such: a
// byte each. The scale is kept in f32, s / encode.
//
// Rotation (before that, of columns of 16 rows): y = H D x / 4, with H the Hadamard matrix of 16
// rows and D signs. It is orthogonal, so a product that sums over these rows, of two operands that
// are rotated alike, is what it was; what is large in one row spreads over all.
//
// Stochastic rounding draws from the block's own numbers: the same block is rounded the same way,
// wherever and whenever it is; any other draws anew.
//
// Pure functions; any thread, and kernels on a GPU, where they give the same bits.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "base/dtype.h"

namespace troupe {

inline constexpr int kFp4Block = 16;
inline constexpr float kLargestFp4 = 6;

// What elements of a block are multiplied by, and what their codes are to be.
struct Fp4Scale {
  float scale = 0;
  float factor = 0;
};

constexpr float fp4_encode_scale(float largest_of_matrix) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (!(largest_of_matrix > 0) || largest_of_matrix == kInfinity) return 1;
  const float encode = f8e4m3::kLargest * kLargestFp4 / largest_of_matrix;
  return encode < std::numeric_limits<float>::max() ? encode : std::numeric_limits<float>::max();
}

constexpr Fp4Scale fp4_scale(float largest_of_matrix, float largest) {
  const float encode = fp4_encode_scale(largest_of_matrix);
  const float s = f8e4m3::nearest(largest / kLargestFp4 * encode);
  return {s / encode, s > 0 ? encode / s : s};
}

// The numbers of E2M1 are as far apart as this where `magnitude` is.
constexpr float fp4_step(float magnitude) {
  if (magnitude < 2) return 0.5F;
  return magnitude < 4 ? 1.0F : 2.0F;
}

constexpr float nearest_fp4(float x) {
  const float magnitude = x < 0 ? -x : x;
  const float step = fp4_step(magnitude);
  // Adding this leaves no bits below 1, rounded to the nearest, ties to even; so of codes, too.
  constexpr float kWhole = 0x1.8p23F;
  float nearest = magnitude;
  if (magnitude < 2 * kLargestFp4) nearest = ((magnitude / step + kWhole) - kWhole) * step;
  if (nearest > kLargestFp4) nearest = kLargestFp4;
  return x < 0 ? -nearest : nearest;
}

// Up with the probability of x's place between two numbers. `draw`: uniform in [0, 1).
constexpr float stochastic_fp4(float x, float draw) {
  const float magnitude = x < 0 ? -x : x;
  if (!(magnitude < kLargestFp4)) return nearest_fp4(x);
  const float step = fp4_step(magnitude);
  const auto below = static_cast<float>(static_cast<int32_t>(magnitude / step));
  const float rounded = (below + (draw < magnitude / step - below ? 1.0F : 0.0F)) * step;
  return x < 0 ? -rounded : rounded;
}

// 16 numbers.
constexpr void rotate_fp4(float* x) {
  // The signs of Transformer Engine's weight gradients.
  constexpr float kSigns[kFp4Block] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  for (int i = 0; i < kFp4Block; ++i) x[i] *= kSigns[i];
  for (int width = 1; width < kFp4Block; width *= 2) {
    for (int i = 0; i < kFp4Block; ++i) {
      if ((i & width) != 0) continue;
      const float sum = x[i] + x[i + width];
      x[i + width] = x[i] - x[i + width];
      x[i] = sum;
    }
  }
  for (int i = 0; i < kFp4Block; ++i) x[i] *= 0.25F;
}

// Uniform in [0, 1), by a block's numbers and a place in it (the finaliser of Murmur's hash).
class Fp4Draws {
 public:
  constexpr Fp4Draws(const float* x, int count) {
    for (int i = 0; i < count; ++i) key_ = mixed(key_ ^ std::bit_cast<uint32_t>(x[i]));
  }
  constexpr float at(int i) const {
    const uint64_t word = mixed(key_ + static_cast<uint64_t>(i) + 1);
    return static_cast<float>(word >> 40) * 0x1p-24F;
  }

 private:
  static constexpr uint64_t mixed(uint64_t word) {
    word = (word ^ word >> 33) * 0xff51afd7ed558ccdU;
    word = (word ^ word >> 33) * 0xc4ceb9fe1a85ec53U;
    return word ^ word >> 33;
  }
  uint64_t key_ = 0x9e3779b97f4a7c15U;
};

constexpr float larger_magnitude(float one, float other) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(other) & 0x7fffffffU;
  return magnitude > std::bit_cast<uint32_t>(one) ? std::bit_cast<float>(magnitude) : one;
}

// Of magnitudes, NaN above all.
constexpr float largest_of(const float* x, int count) {
  float largest = 0;
  for (int i = 0; i < count; ++i) largest = larger_magnitude(largest, x[i]);
  return largest;
}

// Puts the codes of a block's numbers in their places, as numbers of E4M3, and returns its scale.
constexpr float quantize_fp4(float* x, int count, float largest_of_matrix, bool stochastic) {
  const Fp4Scale scale = fp4_scale(largest_of_matrix, largest_of(x, count));
  const Fp4Draws draws(x, stochastic ? count : 0);
  for (int i = 0; i < count; ++i) {
    const float code = x[i] * scale.factor;
    x[i] = stochastic ? stochastic_fp4(code, draws.at(i)) : nearest_fp4(code);
  }
  return scale.scale;
}

}  // namespace troupe
