#include "ops/experts/expert_rows/expert_rows.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kBlock = 256;

// One block: a thread adds up the loads of every kBlock-th part.
__global__ void find_fullest_kernel(const int32_t* loads, int64_t experts,
                                    LimitExpertRowsAttributes attributes, int32_t* over,
                                    int32_t* fullest) {
  __shared__ int32_t largest[kBlock];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  int32_t own = 0;
  for (int32_t part = thread; part < attributes.parts; part += kBlock) {
    int32_t sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += loads[part * experts + e];
    own = max(own, sum);
  }
  largest[thread] = own;
  __syncthreads();
  for (int width = kBlock / 2; width > 0; width /= 2) {
    if (thread < width) largest[thread] = max(largest[thread], largest[thread + width]);
    __syncthreads();
  }
  if (thread != 0) return;
  *fullest = largest[0];
  *over = largest[0] > attributes.rows ? 1 : 0;
}

// `over`: where it is set, nothing is kept; may be null.
__global__ void keep_slots_kernel(const int32_t* indices, int32_t* kept, int64_t slots,
                                  int64_t first, int64_t last, const int32_t* over) {
  const int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (slot >= slots) return;
  const bool is_kept = slot >= first && slot < last && (over == nullptr || *over == 0);
  kept[slot] = is_kept ? indices[slot] : -1;
}

void keep_slots(const CudaKernelArguments& args, int64_t first, int64_t last, const int32_t* over) {
  const int64_t slots = args.input(0).shape.elements();
  launch(args, {static_cast<unsigned>(ceil_divide(slots, kBlock)), kBlock}, keep_slots_kernel,
         args.in<int32_t>(0), args.out<int32_t>(0), slots, first, last, over);
}

void run_limit_expert_rows(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<LimitExpertRowsAttributes>();
  launch(args, {1, kBlock}, find_fullest_kernel, args.in<int32_t>(1),
         args.input(1).shape[0] / attributes.parts, attributes, args.out<int32_t>(1),
         args.out<int32_t>(2));
  keep_slots(args, 0, args.input(0).shape.elements(), args.out<int32_t>(1));
}

void run_keep_tokens(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<KeepTokensAttributes>();
  const int64_t top_k = args.input(0).shape[1];
  keep_slots(args, attributes.first * top_k, (attributes.first + attributes.count) * top_k,
             nullptr);
}

}  // namespace

CudaKernel limit_expert_rows_cuda_kernel(const OpView&) {
  return &run_limit_expert_rows;
}

CudaKernel keep_tokens_cuda_kernel(const OpView&) {
  return &run_keep_tokens;
}

}  // namespace troupe
