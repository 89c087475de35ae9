#include "ops/products/shift_ids/shift_ids.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

__global__ void shift_ids_kernel(const int32_t* ids, int32_t* shifted, int64_t count,
                                 int64_t first) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  constexpr int64_t kLeast = INT32_MIN;
  const int64_t id = ids[i] - first;
  shifted[i] = static_cast<int32_t>(id < kLeast ? kLeast : id);
}

void run_shift_ids(const CudaKernelArguments& args) {
  const int64_t count = args.input(0).shape.elements();
  const int64_t first = args.attributes->as<ShiftIdsAttributes>().first;
  launch(args, {static_cast<unsigned>(ceil_divide(count, 256)), 256}, shift_ids_kernel,
         args.in<int32_t>(0), args.out<int32_t>(0), count, first);
}

}  // namespace

CudaKernel shift_ids_cuda_kernel(const OpView&) {
  return &run_shift_ids;
}

}  // namespace troupe
