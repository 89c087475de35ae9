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
  router_noise = 4,  // input jitter
  dropout = 5,       // `substream` is the place in the model; see DropoutMask
  test = 6,
  random_logits = 7,   // forced balance of the router
  moments = 8,         // rounding of AdamW's moments to f8e4m3
  logit_bias = 9,      // forced imbalance of the router; `substream` is the layer
  expert_shares = 10,  // plans for uneven loads
};

// Four independent 32-bit words at position `index` of (seed, stream, substream).
std::array<uint32_t, 4> random_words(uint64_t seed, RandomStream stream, uint32_t substream,
                                     uint64_t index);

// The seed of one step of `stream` and `substream`: what is drawn from it differs from step to step
// and leaves the whole index to the elements of a tensor.
uint64_t random_step_seed(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t step);

// The words of `count` positions from `first_index` on, in order: words[4 i + w] is word w of
// random_words(..., first_index + i). Several times as fast as asking for each.
void fill_random_words(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t first_index,
                       int64_t count, uint32_t* words);

// Uniform in [0, 1), 53 bits.
double random_uniform(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index);

// Uniform in [0, bound), without modulo bias worth speaking of (64-bit multiply-shift; the bias is
// under bound / 2^64).
uint64_t random_below(uint64_t bound, uint64_t seed, RandomStream stream, uint32_t substream,
                      uint64_t index);

// Standard normal by the Box-Muller transform, in double (within a few units of the last place).
double random_normal(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index);

// values[i] = random_normal(..., first_index + i) for `count` positions: the same bits, in a
// fraction of the time.
void fill_random_normals(uint64_t seed, RandomStream stream, uint32_t substream,
                         uint64_t first_index, int64_t count, double* values);

}  // namespace troupe
