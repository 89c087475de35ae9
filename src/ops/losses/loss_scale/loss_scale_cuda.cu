#include "ops/losses/loss_scale/loss_scale.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

template <class A>
__global__ void scale_gradient_kernel(const A* gradient, const double* scale, A* scaled) {
  *scaled = static_cast<A>(static_cast<double>(*gradient) * *scale);
}

template <class A>
void run_scale_gradient(const CudaKernelArguments& args) {
  launch(args, {1, 1}, scale_gradient_kernel<A>, args.in<A>(0), args.in<double>(1), args.out<A>(0));
}

}  // namespace

CudaKernel scale_gradient_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_scale_gradient<double> : &run_scale_gradient<float>;
}

}  // namespace troupe
