// Rows that a block goes through twice, as norms do: once for a sum, once for a result that needs
// it. The first steps of each thread stay in registers in between, and all of them are on their way
// from memory at once; only what is beyond them is read again.
#pragma once

#include <type_traits>

#include "ops/cuda/device.cuh"

namespace troupe {

inline constexpr int kHeldSteps = 2;  // of a thread
inline constexpr int kHeldThreads =
    512;  // of a block, at most; twice as many fit on a multiprocessor

// Threads of a block for rows of `elements`, taken `step` at a time: so many that they hold all of
// a row, if kHeldThreads are enough.
inline unsigned threads_holding_row(int64_t elements, int64_t step) {
  return static_cast<unsigned>(std::clamp<int64_t>(
      ceil_divide(ceil_divide(elements, step * kHeldSteps), 32) * 32, 32, kHeldThreads));
}

// The gains of a step: kStep numbers that begin at a multiple of a pack.
template <class A, int kStep>
__device__ __forceinline__ void load_gains(const A* gains, A (&values)[kStep]) {
  if constexpr (kStep == 1) {
    values[0] = *gains;
  } else {
    constexpr int kElements = Pack<A>::kElements;
#pragma unroll
    for (int j = 0; j < kStep; j += kElements) {
      const Pack<A> pack = load_pack(gains + j);
#pragma unroll
      for (int k = 0; k < kElements; ++k) values[j + k] = pack.values[k];
    }
  }
}

// The same row of kTensors tensors, of n elements. A tensor may be absent (nullptr): its packs are
// then zeros. Elements may be overwritten by the thread that has them, in the last pass.
template <class T, int kStep, int kTensors>
class HeldRow {
 public:
  __device__ __forceinline__ HeldRow(const T* const (&rows)[kTensors], int64_t n) : n_(n) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) rows_[k] = rows[k];
#pragma unroll
    for (int h = 0; h < kHeldSteps; ++h) {
#pragma unroll
      for (int k = 0; k < kTensors; ++k) {
        held_[h][k] = at(h) < n_ && rows_[k] != nullptr ? load(k, at(h)) : Bits();
      }
    }
  }

  // Calls body(i, packs) for the first elements i of the steps of this thread, with the step of
  // every tensor.
  template <class Body>
  __device__ __forceinline__ void for_steps(const Body& body) const {
    Pack<T> packs[kTensors];
#pragma unroll
    for (int h = 0; h < kHeldSteps; ++h) {
      if (at(h) >= n_) break;
#pragma unroll
      for (int k = 0; k < kTensors; ++k) packs[k] = pack(held_[h][k]);
      body(at(h), packs);
    }
#pragma unroll 1
    for (int64_t i = at(kHeldSteps); i < n_; i += int64_t{blockDim.x} * kStep) {
#pragma unroll
      for (int k = 0; k < kTensors; ++k) {
        packs[k] = pack(rows_[k] != nullptr ? load(k, i) : Bits());
      }
      body(i, packs);
    }
  }

 private:
  // A step as it came from memory: elements of two bytes would take a register each.
  using Bits = std::conditional_t<kStep == 1, Pack<T>, uint4>;

  __device__ __forceinline__ int64_t at(int step) const {
    return (int64_t{threadIdx.x} + int64_t{step} * blockDim.x) * kStep;
  }
  __device__ __forceinline__ Bits load(int tensor, int64_t i) const {
    if constexpr (kStep == 1) {
      return load_step<T, 1>(rows_[tensor] + i);
    } else {
      return *reinterpret_cast<const uint4*>(rows_[tensor] + i);
    }
  }
  __device__ __forceinline__ static Pack<T> pack(Bits bits) {
    // Each pass unpacks anew: the compiler would hold the unpacked elements.
    if constexpr (kStep != 1) {
      asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
    }
    return __builtin_bit_cast(Pack<T>, bits);
  }

  const T* rows_[kTensors];
  int64_t n_;
  Bits held_[kHeldSteps][kTensors];
};

}  // namespace troupe
