// The turning of the pairs of a head (ops/attention/rope/rope.h) by CUDA kernels that put the heads
// of latent attention together.
#pragma once

#include "program/cuda/device.cuh"

namespace troupe {

// The part of a head that turns, kStep neighbouring elements at a time.
struct Turning {
  int rotary;
  bool interleaved;

  __device__ int pairs() const { return rotary / 2; }
  // The other element of the pair of element e.
  __device__ int partner(int e) const {
    if (interleaved) return e ^ 1;
    return e < pairs() ? e + pairs() : e - pairs();
  }
  // The value of element e, from its own and its partner's before; `sign` -1: turned back.
  template <class A>
  __device__ A turned(A own, A other, int e, const A* angles, A sign) const {
    const int pair = interleaved ? e / 2 : e % pairs();
    const bool is_second = interleaved ? e % 2 == 1 : e >= pairs();
    const A sine = (is_second ? sign : -sign) * angles[2 * pair + 1];
    return own * angles[2 * pair] + other * sine;
  }
  // Elements e, ..., e + kStep - 1 of those at x.
  template <class T, int kStep>
  __device__ Pack<T> turned_step(const T* x, int e, const accumulation_t<T>* angles,
                                 accumulation_t<T> sign) const {
    const Pack<T> own = load_step<T, kStep>(x + e);
    Pack<T> other;
    if (kStep > 1 && interleaved) {
#pragma unroll
      for (int j = 0; j < kStep; ++j) other.values[j] = own.values[j ^ 1];
    } else {
      other = load_step<T, kStep>(x + partner(e));
    }
    Pack<T> result;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      result.values[j] =
          round_to<T>(turned(widen(own.values[j]), widen(other.values[j]), e + j, angles, sign));
    }
    return result;
  }
};

}  // namespace troupe
