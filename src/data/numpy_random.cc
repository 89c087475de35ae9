#include "data/numpy_random.h"

#include <bit>
#include <utility>

namespace troupe {
namespace {

template <class T>
void shuffle_values(NumpyRandom& random, std::span<T> values) {
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[random.at_most(i - 1)]);
  }
}

}  // namespace

uint64_t NumpyRandom::at_most(uint64_t max) {
  if (max == 0) return 0;  // without drawing
  const uint64_t mask = ~uint64_t{0} >> std::countl_zero(max);
  uint64_t value = 0;
  do {
    value = word();
    if (max > 0xffffffff) value = (value << 32) | word();
    value &= mask;
  } while (value > max);
  return value;
}

void NumpyRandom::shuffle(std::span<uint32_t> values) {
  shuffle_values(*this, values);
}

void NumpyRandom::shuffle(std::span<uint64_t> values) {
  shuffle_values(*this, values);
}

}  // namespace troupe
