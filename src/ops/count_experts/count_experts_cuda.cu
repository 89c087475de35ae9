#include "ops/count_experts/count_experts.h"
#include "ops/cuda/device.cuh"

namespace troupe {
namespace {

__global__ void copy_counts_kernel(const int32_t* previous, int32_t* counts, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) counts[i] = previous != nullptr ? previous[i] : 0;
}

// Sums of integers are the same in any order.
__global__ void count_experts_kernel(const int32_t* indices, int32_t* counts, int64_t slots,
                                     int64_t top_k, int64_t sequence_tokens, int64_t first_token,
                                     int64_t experts) {
  const int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (slot >= slots) return;
  const int32_t expert = indices[slot];
  if (expert < 0 || expert >= experts) return;
  const int64_t sequence = (first_token + slot / top_k) / sequence_tokens;
  atomicAdd(&counts[sequence * experts + expert], 1);
}

void run_count_experts(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<CountExpertsAttributes>();
  const Shape& indices = args.input(0).shape;
  const int64_t count = args.output(0).shape.elements();
  const int64_t sequence_tokens = attributes.sequence_tokens > 0
                                      ? attributes.sequence_tokens
                                      : indices[0] / attributes.sequences;
  launch(args, {static_cast<unsigned>(ceil_divide(count, 256)), 256}, copy_counts_kernel,
         args.in<int32_t>(1), args.out<int32_t>(0), count);
  launch(args, {static_cast<unsigned>(ceil_divide(indices.elements(), 256)), 256},
         count_experts_kernel, args.in<int32_t>(0), args.out<int32_t>(0), indices.elements(),
         indices[1], sequence_tokens, int64_t{attributes.first_token}, int64_t{attributes.experts});
}

}  // namespace

CudaKernel count_experts_cuda_kernel(const OpView&) {
  return &run_count_experts;
}

}  // namespace troupe
