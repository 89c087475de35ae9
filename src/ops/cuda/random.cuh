// The random numbers of base/random.h and ops/cpu/dropout_mask.h on the GPU: the same words for the
// same (seed, stream, substream, index).
#pragma once

#include <cstdint>

#include "base/random.h"
#include "program/row_origin.h"

namespace troupe {

struct RandomWords {
  uint32_t words[4];
};

// Philox 4x32-10, see base/random.h.
__device__ __forceinline__ RandomWords device_random_words(uint64_t seed, RandomStream stream,
                                                           uint32_t substream, uint64_t index) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53U;
  constexpr uint32_t kMultiplier1 = 0xCD9E8D57U;
  constexpr uint32_t kWeyl0 = 0x9E3779B9U;
  constexpr uint32_t kWeyl1 = 0xBB67AE85U;
  uint32_t c0 = static_cast<uint32_t>(index);
  uint32_t c1 = static_cast<uint32_t>(index >> 32);
  uint32_t c2 = substream;
  uint32_t c3 = static_cast<uint32_t>(stream);
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(kMultiplier0, c0);
    const uint32_t high1 = __umulhi(kMultiplier1, c2);
    const uint32_t next1 = kMultiplier1 * c2;
    const uint32_t next3 = kMultiplier0 * c0;
    c0 = high1 ^ c1 ^ key0;
    c2 = high0 ^ c3 ^ key1;
    c1 = next1;
    c3 = next3;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// random_step_seed() of base/random.h.
__device__ __forceinline__ uint64_t device_step_seed(uint64_t seed, RandomStream stream,
                                                     uint32_t substream, uint64_t step) {
  const RandomWords drawn = device_random_words(seed, stream, substream, step);
  return (static_cast<uint64_t>(drawn.words[0]) << 32) | drawn.words[1];
}

// RowOrigin::whole_row() of program/row_origin.h, for element `element` of a tensor with `width`
// elements in a row: its number in the tensor of the whole micro-batch.
__device__ __forceinline__ uint64_t whole_element(const RowOrigin& origin, int64_t width,
                                                  int64_t element) {
  const int64_t own = origin.first_row + element / width;
  int64_t row = own;
  if (origin.chunks.ranks != 1) {
    const int64_t chunk = origin.sequence / 2;
    const int64_t place = own % origin.sequence;
    const int64_t position =
        place < chunk ? origin.chunks.rank * chunk + place
                      : (2 * origin.chunks.ranks - 2 - origin.chunks.rank) * chunk + place;
    row = own / origin.sequence * origin.sequence * origin.chunks.ranks + position;
  }
  return static_cast<uint64_t>(row * width + element % width);
}

// Dropout as DropoutMask has it. The first three members are set by the host.
struct DeviceDropout {
  uint64_t seed = 0;
  uint32_t substream = 0;
  uint32_t threshold = 0;
  double scale = 1;  // of what is kept

  DeviceDropout() = default;
  DeviceDropout(uint64_t seed_of_run, uint32_t place, double probability)
      : seed(seed_of_run),
        substream(place),
        threshold(static_cast<uint32_t>(probability * 0x1.0p32)),
        scale(1 / (1 - probability)) {}

  __device__ __forceinline__ uint64_t step_seed(int64_t step) const {
    const RandomWords drawn =
        device_random_words(seed, RandomStream::dropout, substream, static_cast<uint64_t>(step));
    return (static_cast<uint64_t>(drawn.words[1]) << 32) | drawn.words[0];
  }
  __device__ __forceinline__ bool keeps(uint64_t step_seed, uint64_t element) const {
    const RandomWords drawn =
        device_random_words(step_seed, RandomStream::dropout, substream, element / 4);
    return drawn.words[element % 4] >= threshold;
  }
};

}  // namespace troupe
