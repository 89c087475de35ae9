// numpy's legacy random generator, as far as the order of data needs it: the values that
// numpy.random.RandomState(seed) shuffles by, bit for bit.
//
// The generator is MT19937 (Matsumoto and Nishimura, "Mersenne Twister", TOMACS 1998), seeded with
// one 32-bit word, which is the standard library's std::mt19937. A number of [0, max] is drawn by
// masking a word to the bits that max needs and drawing again while it is larger; a shuffle is
// Fisher and Yates', from the last element down. numpy promises to keep both as they are (NEP 19).
//
// An object belongs to one thread. Nothing here fails.
#pragma once

#include <cstdint>
#include <random>
#include <span>

namespace troupe {

class NumpyRandom {
 public:
  explicit NumpyRandom(uint32_t seed) : words_(seed) {}

  // A number of [0, max], each as likely as any other. A max above 32 bits takes two words, the
  // first one the higher.
  uint64_t at_most(uint64_t max);

  void shuffle(std::span<uint32_t> values);
  void shuffle(std::span<uint64_t> values);

 private:
  uint64_t word() { return words_(); }

  std::mt19937 words_;
};

}  // namespace troupe
