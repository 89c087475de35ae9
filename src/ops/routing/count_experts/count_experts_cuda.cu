#include "ops/routing/count_experts/count_experts.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

__global__ void copy_counts_kernel(const int32_t* previous, int32_t* counts, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) counts[i] = previous != nullptr ? previous[i] : 0;
}

constexpr int kCountThreads = 256;
constexpr int kCountSlots = 8;  // of a thread

// A block has kCountThreads * kCountSlots slots of the sequence blockIdx.y, from the first one that
// is touched, and counts them by itself before it adds them to the others' counts. Sums of integers
// are the same in any order.
__global__ void __launch_bounds__(kCountThreads)
    count_experts_kernel(const int32_t* indices, const int32_t* mask, int32_t* counts,
                         int64_t slots, int64_t top_k, int64_t sequence_tokens, int64_t first_token,
                         int32_t experts) {
  extern __shared__ int32_t own_counts[];
  const int64_t sequence = first_token / sequence_tokens + blockIdx.y;
  const int64_t sequence_slot = (sequence * sequence_tokens - first_token) * top_k;
  const int64_t sequence_end = sequence_slot + sequence_tokens * top_k;
  const int64_t end = sequence_end < slots ? sequence_end : slots;
  const int64_t first = (sequence_slot > 0 ? sequence_slot : 0) +
                        int64_t{blockIdx.x} * kCountThreads * kCountSlots + threadIdx.x;
  int32_t chosen[kCountSlots];
#pragma unroll
  for (int i = 0; i < kCountSlots; ++i) {
    const int64_t slot = first + i * kCountThreads;
    chosen[i] = slot < end ? indices[slot] : -1;
    if (mask != nullptr && slot < end && mask[slot / top_k] == 0) chosen[i] = -1;
  }
  for_row(experts, [=](int64_t e) { own_counts[e] = 0; });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCountSlots; ++i) {
    if (chosen[i] >= 0 && chosen[i] < experts) atomicAdd(&own_counts[chosen[i]], 1);
  }
  __syncthreads();
  for_row(experts, [=](int64_t e) {
    if (own_counts[e] != 0) atomicAdd(&counts[sequence * experts + e], own_counts[e]);
  });
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
  if (indices.elements() == 0) return;
  const int32_t* mask = args.inputs.size() > 2 ? args.in<int32_t>(2) : nullptr;
  const int64_t first_token = attributes.first_token;
  const int64_t sequences =
      (first_token + indices[0] - 1) / sequence_tokens - first_token / sequence_tokens + 1;
  const int64_t sequence_slots = std::min(sequence_tokens, indices[0]) * indices[1];
  launch(args,
         {dim3(static_cast<unsigned>(ceil_divide(sequence_slots, kCountThreads * kCountSlots)),
               static_cast<unsigned>(sequences)),
          kCountThreads, static_cast<size_t>(attributes.experts) * sizeof(int32_t)},
         count_experts_kernel, args.in<int32_t>(0), mask, args.out<int32_t>(0), indices.elements(),
         indices[1], sequence_tokens, first_token, attributes.experts);
}

}  // namespace

CudaKernel count_experts_cuda_kernel(const OpView&) {
  return &run_count_experts;
}

}  // namespace troupe
