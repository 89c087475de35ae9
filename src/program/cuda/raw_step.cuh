// Steps of a row (device.cuh) as they lie in memory, for kernels that have several loads on their
// way at once: as elements, the compiler would give two bytes a register each, and wait for every
// load before the next to save registers.
#pragma once

#include <type_traits>

#include "program/cuda/device.cuh"

namespace troupe {

template <class T, int kStep>
struct RawStep {
  std::conditional_t<kStep == 1, T, uint4> bits;
};

template <class T, int kStep>
__device__ __forceinline__ RawStep<T, kStep> load_raw(const T* address) {
  return {*reinterpret_cast<const decltype(RawStep<T, kStep>::bits)*>(address)};
}

template <class T, int kStep>
__device__ __forceinline__ Pack<T> unpack(RawStep<T, kStep> step) {
  if constexpr (kStep == 1) {
    Pack<T> pack;
    pack.values[0] = step.bits;
    return pack;
  } else {
    // Here, and anew each time.
    asm volatile("" : "+r"(step.bits.x), "+r"(step.bits.y), "+r"(step.bits.z), "+r"(step.bits.w));
    return __builtin_bit_cast(Pack<T>, step.bits);
  }
}

// A step of numbers of the accumulation type, as gains and their gradients are: kStep of them, that
// begin at a multiple of kStep.
template <class A, int kStep>
__device__ __forceinline__ void load_numbers(const A* address, A (&numbers)[kStep]) {
  constexpr int kElements = std::min(Pack<A>::kElements, kStep);
#pragma unroll
  for (int j = 0; j < kStep; j += kElements) {
    const Pack<A> pack = load_step<A, kElements>(address + j);
#pragma unroll
    for (int k = 0; k < kElements; ++k) numbers[j + k] = pack.values[k];
  }
}
template <class A, int kStep>
__device__ __forceinline__ void store_numbers(const A (&numbers)[kStep], A* address) {
  constexpr int kElements = std::min(Pack<A>::kElements, kStep);
#pragma unroll
  for (int j = 0; j < kStep; j += kElements) {
    Pack<A> pack;
#pragma unroll
    for (int k = 0; k < kElements; ++k) pack.values[k] = numbers[j + k];
    store_step<A, kElements>(address + j, pack);
  }
}

}  // namespace troupe
