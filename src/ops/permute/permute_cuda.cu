#include "ops/cuda/device.cuh"
#include "ops/permute/permute.h"

namespace troupe {
namespace {

// A block for each row of the result.
template <class T, int kStep>
__global__ void permute_kernel(const T* x, const int32_t* row_slot, T* y, LiveRows rows,
                               int64_t hidden, int64_t top_k) {
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const int64_t slot = row_slot[row];
  const T* from = x + slot / top_k * hidden;
  Pack<T> zero;
#pragma unroll
  for (int j = 0; j < kStep; ++j) zero.values[j] = round_to<T>(0.0F);
  for_row_steps<kStep>(hidden, [=](int64_t i) {
    store_step<T, kStep>(y + row * hidden + i, slot >= 0 ? load_step<T, kStep>(from + i) : zero);
  });
}

template <class T>
struct PermuteCuda {
  static void run(const CudaKernelArguments& args) {
    const int64_t hidden = args.input(0).shape[1];
    const bool packs = is_made_of_packs<T>(hidden);
    launch(args,
           {static_cast<unsigned>(args.output(0).shape[0]),
            threads_for_row(hidden, packs ? Pack<T>::kElements : 1)},
           packs ? permute_kernel<T, Pack<T>::kElements> : permute_kernel<T, 1>, args.in<T>(0),
           args.in<int32_t>(1), args.out<T>(0), LiveRows(args.input(1)), hidden,
           args.input(2).shape[1]);
  }
};

}  // namespace

CudaKernel permute_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<PermuteCuda>(op.output(0).dtype);
}

}  // namespace troupe
