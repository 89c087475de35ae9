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

double to_unit_interval(uint32_t high, uint32_t low) {
  const uint64_t word = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace

std::array<uint32_t, 4> random_words(uint64_t seed, RandomStream stream, uint32_t substream,
                                     uint64_t index) {
  std::array<uint32_t, 4> counter = {static_cast<uint32_t>(index),
                                     static_cast<uint32_t>(index >> 32), substream,
                                     static_cast<uint32_t>(stream)};
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * counter[0];
    const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * counter[2];
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
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
