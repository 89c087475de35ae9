#include "ops/cuda/device.cuh"
#include "ops/permute/permute.h"

namespace troupe {
namespace {

// The rows of an expert lie in the order of their tokens. So rows are not copied one after the
// other, but a slice of every expert's rows, then the next slice of every expert's: the copies of a
// token are then made at about the same time, while it is in the L2 cache. In the order of rows, x
// would come from memory nearly as often as tokens have copies. A slice is long enough for memory
// to write it in whole pages.
constexpr int64_t kSliceRows = 16;  // on average, if all rows are live
constexpr int kCopyWarps = 8;       // of a block, which has a slice; a warp has a row at a time
constexpr int kCopyLoads = 8;       // of a thread, that are on their way at once

// By a warp. `from`: nullptr for a row of zeros.
template <class Unit>
__device__ __forceinline__ void copy_row(const Unit* __restrict__ from, Unit* __restrict__ to,
                                         int64_t units) {
  int64_t i = threadIdx.x;
  if (from == nullptr) {
    for (; i < units; i += 32) to[i] = Unit();
    return;
  }
  constexpr int64_t kBatch = 32 * kCopyLoads;
  for (const int64_t batches_end = units / kBatch * kBatch; i < batches_end; i += kBatch) {
    Unit copied[kCopyLoads];
#pragma unroll
    for (int j = 0; j < kCopyLoads; ++j) copied[j] = from[i + 32 * j];
#pragma unroll
    for (int j = 0; j < kCopyLoads; ++j) to[i + 32 * j] = copied[j];
  }
#pragma unroll 4
  for (; i < units; i += 32) to[i] = from[i];
}

// `offsets`: the first row of each expert (block x), and the number of rows. Rows are `units` long,
// there is memory for `bound` of them.
template <class Unit>
__global__ void __launch_bounds__(32 * kCopyWarps, 4)
    permute_kernel(const Unit* __restrict__ x, const int32_t* __restrict__ row_slot,
                   const int32_t* __restrict__ offsets, Unit* __restrict__ y, int64_t bound,
                   int64_t units, int32_t top_k) {
  const auto first = static_cast<uint32_t>(offsets[blockIdx.x]);
  const uint32_t rows = static_cast<uint32_t>(offsets[blockIdx.x + 1]) - first;
  const uint32_t rows_of_all = rows / gridDim.y;
  const uint32_t longer = rows % gridDim.y;  // so many slices have a row more
  const uint32_t slice = blockIdx.y;
  const int64_t slice_begin = first + rows_of_all * slice + (slice < longer ? slice : longer);
  const int64_t slice_end = slice_begin + rows_of_all + (slice < longer ? 1 : 0);
  const int64_t end = slice_end < bound ? slice_end : bound;
  const auto lane = static_cast<int>(threadIdx.x);
  for (int64_t begin = slice_begin + threadIdx.y; begin < end; begin += 32 * kCopyWarps) {
    // The slots of the warp's next 32 rows, one in each lane.
    const int64_t own = begin + lane * kCopyWarps;
    const int32_t own_slot = own < end ? row_slot[own] : -1;
    for (int r = 0; r < 32 && begin + r * kCopyWarps < end; ++r) {
      const int32_t slot = __shfl_sync(0xffffffffU, own_slot, r);
      copy_row(slot >= 0 ? x + int64_t{slot / top_k} * units : nullptr,
               y + (begin + r * kCopyWarps) * units, units);
    }
  }
}

// Moved in units as wide as all rows allow.
void run_permute(const CudaKernelArguments& args) {
  const auto element = static_cast<int64_t>(size_of(args.input(0).dtype));
  const int64_t row_bytes = args.input(0).shape[1] * element;
  const int64_t bound = args.output(0).shape[0];
  const int32_t experts = args.attributes->as<PermuteAttributes>().experts;
  const int64_t slices = std::clamp<int64_t>(ceil_divide(bound, experts * kSliceRows), 1, 65535);
  const auto copy = [&]<class Unit>(Unit) {
    launch(
        args,
        {dim3(static_cast<unsigned>(experts), static_cast<unsigned>(slices)), dim3(32, kCopyWarps)},
        permute_kernel<Unit>, static_cast<const Unit*>(args.input(0).data), args.in<int32_t>(1),
        args.input(1).live_rows - experts, static_cast<Unit*>(args.output(0).data), bound,
        row_bytes / static_cast<int64_t>(sizeof(Unit)), args.input(2).shape[1]);
  };
  if (row_bytes % 16 == 0) {
    copy(uint4());
  } else if (element == 8) {
    copy(uint64_t());
  } else if (element == 4) {
    copy(uint32_t());
  } else {
    copy(uint16_t());
  }
}

}  // namespace

CudaKernel permute_cuda_kernel(const OpView&) {
  return &run_permute;
}

}  // namespace troupe
