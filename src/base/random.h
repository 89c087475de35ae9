// Counter-based random numbers (Philox 4x32-10; Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). A number is a pure function of (seed, stream, index), so whatever is drawn
// does not depend on the parallel layout, on the number of threads, or on what was drawn before.
// All functions are pure and may be called from any thread.
#pragma once

#include <array>
#include <cstdint>

namespace troupe {

// What a random number is for. Streams never share numbers. Values are part of what a seed means:
// they are never renumbered.
enum class RandomStream : uint32_t {
  parameter = 1,     // initial weights; `substream` is the parameter's global number
  sampling = 3,      // text generation
  router_noise = 4,  // input jitter, forced balance
  dropout = 5,
  test = 6,
};

// Four independent 32-bit words at position `index` of (seed, stream, substream).
std::array<uint32_t, 4> random_words(uint64_t seed, RandomStream stream, uint32_t substream,
                                     uint64_t index);

// Uniform in [0, 1), 53 bits.
double random_uniform(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index);

// Uniform in [0, bound), without modulo bias worth speaking of (64-bit multiply-shift; the bias is
// under bound / 2^64).
uint64_t random_below(uint64_t bound, uint64_t seed, RandomStream stream, uint32_t substream,
                      uint64_t index);

// Standard normal by the Box-Muller transform, in double.
double random_normal(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index);

}  // namespace troupe
