#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kPlanThreads = 256;

// A block for each rank: goes through the tokens in order, kPlanThreads at a time, and numbers
// those that go to the rank.
__global__ void dispatch_plan_kernel(const int32_t* indices, int32_t* counts, int32_t* slots,
                                     int64_t tokens, int64_t top_k, int32_t ranks,
                                     DispatchPlanAttributes attributes) {
  __shared__ int32_t warp_counts[kPlanThreads / 32];
  const auto rank = static_cast<int32_t>(blockIdx.x);
  const int32_t part = rank / attributes.part_stride % attributes.parts;
  const int32_t experts_of_part = attributes.experts / attributes.parts;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int32_t total = 0;
  for (int64_t first = 0; first < tokens; first += kPlanThreads) {
    const int64_t token = first + threadIdx.x;
    bool goes = false;
    if (token < tokens) {
      for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
        const int32_t expert = indices[choice];
        goes = goes ||
               (expert >= 0 && expert < attributes.experts && expert / experts_of_part == part);
      }
    }
    const uint32_t going = __ballot_sync(0xffffffffU, goes);
    __syncthreads();
    if (lane == 0) warp_counts[warp] = __popc(going);
    __syncthreads();
    int32_t before = total + __popc(going & ((1U << lane) - 1U));
    for (int w = 0; w < warp; ++w) before += warp_counts[w];
    for (int w = 0; w < kPlanThreads / 32; ++w) total += warp_counts[w];
    if (token < tokens) slots[token * ranks + rank] = goes ? before : -1;
  }
  if (threadIdx.x == 0) counts[rank] = total;
}

void run_dispatch_plan(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<DispatchPlanAttributes>();
  const Shape& indices = args.input(0).shape;
  launch(args, {static_cast<unsigned>(attributes.ranks()), kPlanThreads}, dispatch_plan_kernel,
         args.in<int32_t>(0), args.out<int32_t>(0), args.out<int32_t>(1), indices[0], indices[1],
         attributes.ranks(), attributes);
}

}  // namespace

CudaKernel dispatch_plan_cuda_kernel(const OpView&) {
  return &run_dispatch_plan;
}

}  // namespace troupe
