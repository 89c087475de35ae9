#include "ops/cuda/device.cuh"
#include "ops/permute/permute.h"

namespace troupe {
namespace {

// A warp for each row of the result: several loads of it are on their way at once.
constexpr int kRowsOfBlock = 4;

template <class T, int kStep>
__global__ void __launch_bounds__(32 * kRowsOfBlock)
    permute_kernel(const T* __restrict__ x, const int32_t* __restrict__ row_slot, T* __restrict__ y,
                   LiveRows rows, int64_t hidden, int64_t top_k) {
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.y;
  if (row >= rows.bound) return;
  const int64_t slot = row_slot[row];  // beyond the live rows anything, and not used
  if (row >= rows.count()) return;
  const T* from = x + slot / top_k * hidden;
  Pack<T> zero;
#pragma unroll
  for (int j = 0; j < kStep; ++j) zero.values[j] = round_to<T>(0.0F);
#pragma unroll 8
  for (int64_t i = int64_t{threadIdx.x} * kStep; i < hidden; i += 32 * kStep) {
    store_step<T, kStep>(y + row * hidden + i, slot >= 0 ? load_step<T, kStep>(from + i) : zero);
  }
}

template <class T>
struct PermuteCuda {
  static void run(const CudaKernelArguments& args) {
    const int64_t hidden = args.input(0).shape[1];
    launch(
        args,
        {static_cast<unsigned>(ceil_divide(args.output(0).shape[0], kRowsOfBlock)),
         dim3(32, kRowsOfBlock)},
        is_made_of_packs<T>(hidden) ? permute_kernel<T, Pack<T>::kElements> : permute_kernel<T, 1>,
        args.in<T>(0), args.in<int32_t>(1), args.out<T>(0), LiveRows(args.input(1)), hidden,
        args.input(2).shape[1]);
  }
};

}  // namespace

CudaKernel permute_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<PermuteCuda>(op.output(0).dtype);
}

}  // namespace troupe
