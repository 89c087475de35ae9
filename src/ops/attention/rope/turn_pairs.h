// The turning of the pairs of a head (rope.h) by CPU kernels. Any thread.
#pragma once

#include <cstdint>

#include "ops/cpu/vector.h"

namespace troupe {

// Which elements make a pair: (2 i, 2 i + 1) if interleaved, else (i, i + dim / 2).
struct PairLayout {
  int64_t dim = 0;  // of the elements that turn
  bool interleaved = false;

  int64_t pairs() const { return dim / 2; }
  int64_t step() const { return interleaved ? 2 : 1; }
  int64_t partner() const { return interleaved ? 1 : pairs(); }
};

// Turns the elements at `x` by a row of the table (ops/attention/rope/rope.h), or back with a sign
// of -1. `y` may be `x`.
template <class T>
void turn_pairs(const T* x, const accumulation_t<T>* angles, accumulation_t<T> sign,
                const PairLayout& layout, T* y) {
  const int64_t step = layout.step();
  const int64_t partner = layout.partner();
  const int64_t pairs = layout.pairs();
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < pairs; ++i) {
    const accumulation_t<T> cosine = angles[2 * i];
    const accumulation_t<T> sine = sign * angles[2 * i + 1];
    const accumulation_t<T> first = widen(x[i * step]);
    const accumulation_t<T> second = widen(x[i * step + partner]);
    y[i * step] = T(first * cosine - second * sine);
    y[i * step + partner] = T(second * cosine + first * sine);
  }
}

}  // namespace troupe
