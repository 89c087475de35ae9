#include "ops/routing/local_experts/local_experts.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

__global__ void local_experts_kernel(const int32_t* chosen, const int32_t* received, int32_t* local,
                                     LiveRows rows, int64_t top_k, int64_t block,
                                     LocalExpertsAttributes attributes) {
  const int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t row = slot / top_k;
  if (row >= rows.bound) return;
  const bool is_live =
      row < rows.count() && (received == nullptr || row % block < received[row / block]);
  int32_t expert = -1;
  if (is_live && chosen[slot] >= attributes.first &&
      chosen[slot] - attributes.first < attributes.count) {
    expert = chosen[slot] - attributes.first;
  }
  local[slot] = expert;
}

void run_local_experts(const CudaKernelArguments& args) {
  const Shape& shape = args.input(0).shape;
  const auto* received = args.in<int32_t>(1);
  const int64_t block = received != nullptr ? shape[0] / args.input(1).shape[0] : shape[0];
  launch(args, {static_cast<unsigned>(ceil_divide(shape.elements(), 256)), 256},
         local_experts_kernel, args.in<int32_t>(0), received, args.out<int32_t>(0),
         LiveRows(args.input(0)), shape[1], block, args.attributes->as<LocalExpertsAttributes>());
}

}  // namespace

CudaKernel local_experts_cuda_kernel(const OpView&) {
  return &run_local_experts;
}

}  // namespace troupe
