#include "ops/cuda/device.cuh"
#include "ops/permute/permute.h"

namespace troupe {
namespace {

// A warp for each token and stretch of kBatch steps of each lane: the stretch is read once, and
// written to the rows of all slots. The warps also share the rows among them that belong to no
// slot, `share` for each token.
constexpr int kTokensOfBlock = 4;
constexpr int kBatch = 4;

template <class T, int kStep>
__global__ void __launch_bounds__(32 * kTokensOfBlock)
    permute_kernel(const T* __restrict__ x, const int32_t* __restrict__ row_slot,
                   const int32_t* __restrict__ slot_row, T* __restrict__ y, LiveRows rows,
                   LiveRows tokens, int64_t hidden, int64_t top_k, int64_t share) {
  const int64_t token = int64_t{blockIdx.x} * kTokensOfBlock + threadIdx.y;
  if (token >= tokens.bound) return;
  const auto lane = static_cast<int>(threadIdx.x);
  const int64_t first = (int64_t{blockIdx.y} * kBatch * 32 + lane) * kStep;
  Pack<T> values[kBatch];
  const auto store = [&](int64_t row) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t i = first + b * 32 * kStep;
      if (i < hidden) store_step<T, kStep>(y + row * hidden + i, values[b]);
    }
  };
  if (token < tokens.count()) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t i = first + b * 32 * kStep;
      if (i < hidden) values[b] = load_step<T, kStep>(x + token * hidden + i);
    }
#pragma unroll 4
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t row = slot_row[token * top_k + k];
      if (row >= 0) store(row);
    }
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
#pragma unroll
    for (int j = 0; j < kStep; ++j) values[b].values[j] = round_to<T>(0.0F);
  }
  const int64_t live = rows.count();
  const int64_t end = (token + 1) * share < live ? (token + 1) * share : live;
  for (int64_t row = token * share; row < end; row += 32) {
    const bool is_filler = row + lane < end && row_slot[row + lane] < 0;
    for (uint32_t fillers = __ballot_sync(0xffffffffU, is_filler); fillers != 0;
         fillers &= fillers - 1) {
      store(row + __ffs(static_cast<int>(fillers)) - 1);
    }
  }
}

template <class T>
struct PermuteCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& slots = args.input(2).shape;
    const int64_t hidden = args.input(0).shape[1];
    const bool packs = is_made_of_packs<T>(hidden);
    const int64_t stretch = int64_t{kBatch} * 32 * (packs ? Pack<T>::kElements : 1);
    launch(args,
           {dim3(static_cast<unsigned>(ceil_divide(slots[0], kTokensOfBlock)),
                 static_cast<unsigned>(ceil_divide(hidden, stretch))),
            dim3(32, kTokensOfBlock)},
           packs ? permute_kernel<T, Pack<T>::kElements> : permute_kernel<T, 1>, args.in<T>(0),
           args.in<int32_t>(1), args.in<int32_t>(2), args.out<T>(0), LiveRows(args.input(1)),
           LiveRows(args.input(2)), hidden, slots[1],
           ceil_divide(args.output(0).shape[0], slots[0]));
  }
};

}  // namespace

CudaKernel permute_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<PermuteCuda>(op.output(0).dtype);
}

}  // namespace troupe
