// The scale of a block, by its largest element.
#pragma once

#include "ops/precision/scale_blocks.h"

namespace troupe {

struct BlockScale {
  float scale;
  float factor;  // what its elements are multiplied by
};

// In f32; `largest`: the bits of the largest magnitude.
__device__ __forceinline__ BlockScale block_scale(ScaleRule rule, float largest_code,
                                                  uint32_t largest) {
  if (rule == ScaleRule::power_of_two) {
    const float scale = exponent_scale(scale_exponent(largest));
    return {scale, 1 / scale};
  }
  float factor = 1;
  if (largest > 0 && largest < 0x7f800000U) {
    factor = fminf(largest_code / __uint_as_float(largest), 3.402823466e+38F);
  }
  return {1 / factor, factor};
}

}  // namespace troupe
