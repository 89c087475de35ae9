#include "ops/elementwise/add_bias/add_bias.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

template <class T>
__global__ void add_bias_kernel(const T* x, const T* bias, T* y, int64_t columns) {
  const int64_t first = int64_t{blockIdx.x} * columns;
  for_row(columns,
          [=](int64_t n) { y[first + n] = round_to<T>(widen(x[first + n]) + widen(bias[n])); });
}

template <class T>
struct AddBiasCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    if (shape.elements() == 0) return;
    launch(args, {static_cast<unsigned>(shape[0]), threads_for_row(shape[1], 1)},
           add_bias_kernel<T>, args.in<T>(0), args.in<T>(1), args.out<T>(0), shape[1]);
  }
};

}  // namespace

CudaKernel add_bias_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<AddBiasCuda>(op.output(0).dtype);
}

}  // namespace troupe
