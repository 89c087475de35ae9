#include "ops/experts/combine/combine.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Room for this many numbers at least: the compiler reads several ahead of the loop that may use
// them.
constexpr int64_t kSortedPad = 4;

// A block for each token. `sorted` holds the token's rows in ascending order: each finds its place
// by counting the lower ones.
template <class T, int kStep>
__global__ void combine_kernel(const T* rows, const int32_t* slot_row, T* y, int64_t hidden,
                               int top_k) {
  using A = accumulation_t<T>;
  extern __shared__ int32_t sorted[];
  const int32_t* own = slot_row + int64_t{blockIdx.x} * top_k;
  int count = 0;
  for (int slot = 0; slot < top_k; ++slot) count += own[slot] >= 0 ? 1 : 0;
  for_row(top_k, [=](int64_t slot) {
    const int32_t row = own[slot];
    if (row < 0) return;
    int place = 0;
    for (int other = 0; other < top_k; ++other) {
      place += own[other] >= 0 && own[other] < row ? 1 : 0;
    }
    sorted[place] = row;
  });
  __syncthreads();
  T* out = y + int64_t{blockIdx.x} * hidden;
  for_row_steps<kStep>(hidden, [=](int64_t i) {
    A sums[kStep];
#pragma unroll
    for (int j = 0; j < kStep; ++j) sums[j] = A(0);
    for (int place = 0; place < count; ++place) {
      const Pack<T> term = load_step<T, kStep>(rows + sorted[place] * hidden + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        sums[j] = place == 0 ? widen(term.values[j]) : sums[j] + widen(term.values[j]);
      }
    }
    Pack<T> result;
#pragma unroll
    for (int j = 0; j < kStep; ++j) result.values[j] = round_to<T>(sums[j]);
    store_step<T, kStep>(out + i, result);
  });
}

template <class T>
struct CombineCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& slots = args.input(2).shape;
    const int64_t hidden = args.input(0).shape[1];
    const bool packs = is_made_of_packs<T>(hidden);
    launch(
        args,
        {static_cast<unsigned>(slots[0]), threads_for_row(hidden, packs ? Pack<T>::kElements : 1),
         static_cast<size_t>(ceil_divide(slots[1], kSortedPad) * kSortedPad) * sizeof(int32_t)},
        packs ? combine_kernel<T, Pack<T>::kElements> : combine_kernel<T, 1>, args.in<T>(0),
        args.in<int32_t>(2), args.out<T>(0), hidden, static_cast<int>(slots[1]));
  }
};

}  // namespace

CudaKernel combine_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<CombineCuda>(op.output(0).dtype);
}

}  // namespace troupe
