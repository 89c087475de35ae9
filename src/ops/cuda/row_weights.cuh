// The router's weights of the rows of experts, for kernels that multiply by them.
//
// Device functions, and what launches give them.
#pragma once

#include "program/cuda/device.cuh"

namespace troupe {

// The router's weight of each row.
template <class A>
struct RowWeights {
  const A* weights;  // nullptr: all are 1
  const int32_t* row_slot;
  int64_t slots;

  // -1: none, so the row is a filler.
  __device__ int64_t slot(int64_t row) const {
    if (weights == nullptr) return 0;
    const int32_t slot = row_slot[row];
    return slot < slots ? slot : -1;
  }
  __device__ A of_slot(int64_t slot) const {
    if (slot < 0) return A(0);
    return weights != nullptr ? weights[slot] : A(1);
  }
};

// From input `i` and the one after it, the rows' slots.
template <class A>
RowWeights<A> row_weights(const CudaKernelArguments& args, int i) {
  const A* weights = args.in<A>(i);
  return {weights, args.in<int32_t>(i + 1),
          weights != nullptr ? args.input(i).shape.elements() : 0};
}

}  // namespace troupe
