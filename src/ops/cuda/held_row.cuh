// Rows that a block goes through twice, as norms do: once for a sum, once for a result that needs
// it. The first steps of each thread stay in registers in between, and all of them are on their way
// from memory at once; only what follows them is read again.
#pragma once

#include "program/cuda/raw_step.cuh"

namespace troupe {

inline constexpr int kHeldSteps = 2;      // of a thread
inline constexpr int kHeldThreads = 512;  // of a block, at most

// Threads of a block for rows of `elements`, taken `step` at a time: enough to hold all of a row,
// if kHeldThreads are enough.
inline unsigned threads_holding_row(int64_t elements, int64_t step) {
  return static_cast<unsigned>(std::clamp<int64_t>(
      ceil_divide(ceil_divide(elements, step * kHeldSteps), 32) * 32, 32, kHeldThreads));
}

// Launches a kernel with a block for each row of input 0, which is [rows, n]: `by_packs` where the
// rows are made of packs, `by_element` elsewhere. It takes `values`, the live rows, n, and `last`.
template <class T, class Kernel, class Last, class... Values>
void launch_on_held_rows(const CudaKernelArguments& args, Kernel* by_packs, Kernel* by_element,
                         const Last& last, const Values&... values) {
  const Shape& shape = args.input(0).shape;
  const bool packs = is_made_of_packs<T>(shape[1]);
  launch(args,
         {static_cast<unsigned>(shape[0]),
          threads_holding_row(shape[1], packs ? Pack<T>::kElements : 1)},
         packs ? by_packs : by_element, values..., LiveRows(args.input(0)), shape[1], last);
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
        held_[h][k] = at(h) < n_ && rows_[k] != nullptr ? load(k, at(h)) : RawStep<T, kStep>();
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
      for (int k = 0; k < kTensors; ++k) packs[k] = unpack(held_[h][k]);
      body(at(h), packs);
    }
#pragma unroll 1
    for (int64_t i = at(kHeldSteps); i < n_; i += int64_t{blockDim.x} * kStep) {
#pragma unroll
      for (int k = 0; k < kTensors; ++k) {
        packs[k] = unpack(rows_[k] != nullptr ? load(k, i) : RawStep<T, kStep>());
      }
      body(i, packs);
    }
  }

 private:
  __device__ __forceinline__ int64_t at(int step) const {
    return (int64_t{threadIdx.x} + int64_t{step} * blockDim.x) * kStep;
  }
  __device__ __forceinline__ RawStep<T, kStep> load(int tensor, int64_t i) const {
    return load_raw<T, kStep>(rows_[tensor] + i);
  }

  const T* rows_[kTensors];
  int64_t n_;
  RawStep<T, kStep> held_[kHeldSteps][kTensors];
};

}  // namespace troupe
