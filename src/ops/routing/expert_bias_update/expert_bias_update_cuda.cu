#include "ops/routing/expert_bias_update/expert_bias_update.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// One block. Counts are whole numbers, so their sum is exact in any order.
__global__ void expert_bias_update_kernel(const double* counts, const int32_t* skip, float* bias,
                                          int64_t experts, float rate) {
  __shared__ double shared[32];
  if (*skip != 0) return;
  double total = 0;
  for_row(experts, [&](int64_t i) { total += counts[i]; });
  total = block_sum(total, shared);
  for_row(experts, [=](int64_t i) {
    const double share = static_cast<double>(experts) * counts[i];
    if (share < total) bias[i] += rate;
    if (share > total) bias[i] -= rate;
  });
}

void run_expert_bias_update(const CudaKernelArguments& args) {
  const auto rate = static_cast<float>(args.attributes->as<ExpertBiasUpdateAttributes>().rate);
  launch(args, {1, 256}, expert_bias_update_kernel, args.in<double>(1), args.in<int32_t>(2),
         args.out<float>(0), args.input(0).shape[0], rate);
}

}  // namespace

CudaKernel expert_bias_update_cuda_kernel(const OpView&) {
  return &run_expert_bias_update;
}

}  // namespace troupe
