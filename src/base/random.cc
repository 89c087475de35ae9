#include "base/random.h"

#include <cmath>
#include <numbers>

namespace troupe {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53U;
constexpr uint32_t kMultiplier1 = 0xCD9E8D57U;
constexpr uint32_t kWeyl0 = 0x9E3779B9U;
constexpr uint32_t kWeyl1 = 0xBB67AE85U;
constexpr int kRounds = 10;

// Positions that are computed side by side, in vector registers.
constexpr int kLanes = 16;

// The words of `Lanes` positions from `index` on, position by position.
template <int Lanes>
void philox(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index,
            uint32_t* words) {
  uint32_t c0[Lanes];
  uint32_t c1[Lanes];
  uint32_t c2[Lanes];
  uint32_t c3[Lanes];
  for (int i = 0; i < Lanes; ++i) {
    const uint64_t position = index + static_cast<uint64_t>(i);
    c0[i] = static_cast<uint32_t>(position);
    c1[i] = static_cast<uint32_t>(position >> 32);
    c2[i] = substream;
    c3[i] = static_cast<uint32_t>(stream);
  }
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < Lanes; ++i) {
      const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * c0[i];
      const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * c2[i];
      c0[i] = static_cast<uint32_t>(product1 >> 32) ^ c1[i] ^ key0;
      c1[i] = static_cast<uint32_t>(product1);
      c2[i] = static_cast<uint32_t>(product0 >> 32) ^ c3[i] ^ key1;
      c3[i] = static_cast<uint32_t>(product0);
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  for (int i = 0; i < Lanes; ++i) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

double to_unit_interval(uint32_t high, uint32_t low) {
  const uint64_t word = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace

std::array<uint32_t, 4> random_words(uint64_t seed, RandomStream stream, uint32_t substream,
                                     uint64_t index) {
  std::array<uint32_t, 4> words;
  philox<1>(seed, stream, substream, index, words.data());
  return words;
}

void fill_random_words(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t first_index,
                       int64_t count, uint32_t* words) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    philox<kLanes>(seed, stream, substream, first_index + static_cast<uint64_t>(i), words + 4 * i);
  }
  for (; i < count; ++i) {
    philox<1>(seed, stream, substream, first_index + static_cast<uint64_t>(i), words + 4 * i);
  }
}

uint64_t random_step_seed(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t step) {
  const auto words = random_words(seed, stream, substream, step);
  return (static_cast<uint64_t>(words[0]) << 32) | words[1];
}

double random_uniform(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index) {
  const auto words = random_words(seed, stream, substream, index);
  return to_unit_interval(words[0], words[1]);
}

uint64_t random_below(uint64_t bound, uint64_t seed, RandomStream stream, uint32_t substream,
                      uint64_t index) {
  const auto words = random_words(seed, stream, substream, index);
  const uint64_t word = (static_cast<uint64_t>(words[0]) << 32) | words[1];
  return static_cast<uint64_t>((static_cast<unsigned __int128>(word) * bound) >> 64);
}

double random_normal(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index) {
  const auto words = random_words(seed, stream, substream, index);
  const double u = 1.0 - to_unit_interval(words[0], words[1]);  // in (0, 1]
  const double v = to_unit_interval(words[2], words[3]);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

}  // namespace troupe
