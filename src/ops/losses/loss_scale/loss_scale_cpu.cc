#include "ops/losses/loss_scale/loss_scale.h"

namespace troupe {
namespace {

template <class A>
void run_scale_gradient(const KernelArguments& args) {
  *args.out<A>(0) = static_cast<A>(static_cast<double>(*args.in<A>(0)) * *args.in<double>(1));
}

}  // namespace

CpuKernel scale_gradient_cpu_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_scale_gradient<double> : &run_scale_gradient<float>;
}

}  // namespace troupe
