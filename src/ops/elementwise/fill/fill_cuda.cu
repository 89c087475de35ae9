#include "ops/elementwise/fill/fill.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

template <class T>
__global__ void fill_kernel(T* y, int64_t elements, T value) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    y[i] = value;
  }
}

template <class T>
void run_fill(const CudaKernelArguments& args) {
  const int64_t elements = args.output(0).shape.elements();
  const double value = args.attributes->as<FillAttributes>().value;
  launch(args, {blocks_for(args, elements, 256), 256}, fill_kernel<T>, args.out<T>(0), elements,
         static_cast<T>(value));
}

}  // namespace

CudaKernel fill_cuda_kernel(const OpView& op) {
  switch (op.output(0).dtype) {
    case DType::f64:
      return &run_fill<double>;
    case DType::f32:
      return &run_fill<float>;
    case DType::bf16:
      return &run_fill<Bf16>;
    case DType::f16:
      return &run_fill<F16>;
    case DType::f8e4m3:  // no number without its scale
    case DType::f8e5m2:
      break;
    case DType::i64:
      return &run_fill<int64_t>;
    case DType::i32:
      return &run_fill<int32_t>;
    case DType::u8:
      return &run_fill<uint8_t>;
  }
  return nullptr;
}

}  // namespace troupe
