#include "ops/experts/permute/permute.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A block for each token: a thread reads a unit of it once, and writes it to all of the token's
// rows. They are not read again soon, and should not take the place of others in the cache. The
// blocks after those have kFillerRows rows each, and clear the fillers among them, a warp for
// every 32 rows. Rows are `units` long.
constexpr int kFillerRows = 256;

template <class Unit>
__global__ void permute_kernel(const Unit* __restrict__ x, const int32_t* __restrict__ row_slot,
                               const int32_t* __restrict__ slot_row, Unit* __restrict__ y,
                               LiveRows rows, int64_t tokens, int64_t units, int32_t top_k) {
  const int64_t token = blockIdx.x;
  if (token < tokens) {
    const int32_t* own = slot_row + token * top_k;
    for_row(units, [=](int64_t i) {
      const Unit unit = x[token * units + i];
#pragma unroll 4
      for (int32_t slot = 0; slot < top_k; ++slot) {
        const int32_t row = own[slot];
        if (row >= 0) __stcs(y + row * units + i, unit);
      }
    });
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t live = rows.count();
  const int64_t begin = (token - tokens) * kFillerRows;
  for (int64_t first = begin + threadIdx.x / 32 * 32; first < begin + kFillerRows && first < live;
       first += blockDim.x) {
    const bool fills = first + lane < live && row_slot[first + lane] < 0;
    uint32_t fillers = __ballot_sync(0xffffffffU, fills);
    for (; fillers != 0; fillers &= fillers - 1) {
      const int64_t row = first + __ffs(static_cast<int>(fillers)) - 1;
      for (int64_t i = lane; i < units; i += 32) y[row * units + i] = Unit();
    }
  }
}

// Moved in units as wide as all rows allow.
void run_permute(const CudaKernelArguments& args) {
  const auto element = static_cast<int64_t>(size_of(args.input(0).dtype));
  const int64_t tokens = args.input(2).shape[0];
  const int64_t row_bytes = args.input(0).shape[1] * element;
  const LiveRows rows(args.input(1));
  const auto copy = [&]<class Unit>(Unit) {
    const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
    launch(args,
           {static_cast<unsigned>(tokens + ceil_divide(rows.bound, kFillerRows)),
            threads_for_row(units, 1)},
           permute_kernel<Unit>, static_cast<const Unit*>(args.input(0).data), args.in<int32_t>(1),
           args.in<int32_t>(2), static_cast<Unit*>(args.output(0).data), rows, tokens, units,
           args.input(2).shape[1]);
  };
  if (row_bytes % 16 == 0) {
    copy(uint4());
  } else if (element == 8) {
    copy(double());
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
