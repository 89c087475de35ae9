// Coded rows (coded_block.h) on GPUs, a step of a block at a time, for kernels: kStep elements of
// each of the kCodedBlock / kStep threads side by side that have a block.
#pragma once

#include <cstdint>
#include <cuda_fp8.h>

#include "ops/exchange/coded_rows/coded_block.h"
#include "ops/precision/scale_blocks.h"
#include "program/cuda/device.cuh"

namespace troupe {

// The codes of a step, first element lowest, and the scale of its block. All threads of the block
// call it.
template <int kStep>
__device__ __forceinline__ uint64_t encode_step(const float (&values)[kStep], uint8_t* scale) {
  static_assert(kStep <= 8 && kCodedBlock % kStep == 0, "codes of a step fill a word or less");
  constexpr int kLanes = static_cast<int>(kCodedBlock) / kStep;
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kStep; ++j) largest = max(largest, __float_as_uint(values[j]) & 0x7fffffffU);
  const unsigned block = (~0U >> (32 - kLanes)) << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) {
    largest = max(largest, __shfl_xor_sync(block, largest, other));
  }
  *scale = scale_exponent(largest);
  const float factor = 1 / exponent_scale(*scale);
  uint64_t codes = 0;
#pragma unroll
  for (int j = 0; j < kStep; ++j) {
    const auto code = __nv_cvt_float_to_fp8(values[j] * factor, __NV_SATFINITE, __NV_E4M3);
    codes |= static_cast<uint64_t>(code) << (8 * j);
  }
  return codes;
}

// Element j of a step.
template <class T>
__device__ __forceinline__ T decode_element(uint64_t codes, int j, uint8_t scale) {
  using A = accumulation_t<T>;
  const auto code = static_cast<uint8_t>(codes >> (8 * j));
  const float value = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
  return round_to<T>(static_cast<A>(value) * static_cast<A>(exponent_scale(scale)));
}

}  // namespace troupe
