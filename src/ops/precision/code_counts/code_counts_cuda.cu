#include "ops/precision/code_counts/code_counts.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

using Count = unsigned long long;  // what atomicAdd takes

constexpr int kCodeCountsThreads = 256;

// How many bytes of `word` are `byte`.
__device__ __forceinline__ uint32_t count_bytes(uint32_t word, uint32_t byte) {
  return static_cast<uint32_t>(__popc(__vcmpeq4(word, byte * 0x01010101U))) / 8;
}

// Adds to the last two of the counts. Sums of whole numbers are the same in any order.
__global__ void __launch_bounds__(kCodeCountsThreads)
    code_counts_kernel(const uint8_t* codes, LiveRows rows, int64_t row_elements, uint32_t largest,
                       Count* counts) {
  __shared__ Count shared[32];
  const int64_t elements = live_elements(rows, row_elements);
  Count saturated = 0;
  Count zeros = 0;
  for_packs<uint8_t>(
      elements,
      [&](int64_t i) {
        const uint4 pack = *reinterpret_cast<const uint4*>(codes + i);
        for (const uint32_t word : {pack.x, pack.y, pack.z, pack.w}) {
          const uint32_t magnitudes = word & 0x7f7f7f7fU;
          saturated += count_bytes(magnitudes, largest);
          zeros += count_bytes(magnitudes, 0);
        }
      },
      [&](int64_t i) {
        const uint32_t magnitude = codes[i] & 0x7fU;
        saturated += magnitude == largest ? 1 : 0;
        zeros += magnitude == 0 ? 1 : 0;
      });
  saturated = block_sum(saturated, shared);
  zeros = block_sum(zeros, shared);
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) counts[0] = static_cast<Count>(elements);
  atomicAdd(counts + 1, saturated);
  atomicAdd(counts + 2, zeros);
}

template <class Code>
void run_code_counts(const CudaKernelArguments& args) {
  constexpr uint32_t kLargest = Code::nearest(Code::kLargest).bits;
  const CudaTensor& codes = args.input(0);
  auto* const counts = reinterpret_cast<Count*>(args.out<int64_t>(0));
  clear(args, counts, kCountsOfCodes * sizeof(Count));
  launch(args,
         {blocks_for(args, codes.shape.elements(), kCodeCountsThreads * Pack<uint8_t>::kElements),
          kCodeCountsThreads},
         code_counts_kernel, static_cast<const uint8_t*>(codes.data), LiveRows(codes),
         codes.shape.row_elements(), kLargest, counts);
}

}  // namespace

CudaKernel code_counts_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f8e4m3 ? &run_code_counts<f8e4m3> : &run_code_counts<f8e5m2>;
}

}  // namespace troupe
