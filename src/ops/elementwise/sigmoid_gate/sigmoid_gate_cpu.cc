#include "ops/cpu/vector.h"
#include "ops/elementwise/sigmoid_gate/sigmoid_gate.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
struct SigmoidGateKernel {
  static void run(const KernelArguments& args) {
    const T* x = args.in<T>(0);
    const T* gate = args.in<T>(1);
    T* y = args.out<T>(0);
    const auto compute = [=](int64_t begin, int64_t end, int) {
      TROUPE_INDEPENDENT
      for (int64_t i = begin; i < end; ++i) y[i] = T(widen(x[i]) * sigmoid(widen(gate[i])));
    };
    args.pool->parallel_ranges(args.input(0).shape.elements(), row_grain(1), compute);
  }
};

template <class T>
struct SigmoidGateGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* dy = args.in<T>(0);
    const T* x = args.in<T>(1);
    const T* gate = args.in<T>(2);
    T* dx = args.out<T>(0);
    T* d_gate = args.out<T>(1);
    const auto compute = [=](int64_t begin, int64_t end, int) {
      TROUPE_INDEPENDENT
      for (int64_t i = begin; i < end; ++i) {
        const A s = sigmoid(widen(gate[i]));
        const A d = widen(dy[i]);
        d_gate[i] = T(d * widen(x[i]) * s * (A(1) - s));
        dx[i] = T(d * s);
      }
    };
    args.pool->parallel_ranges(args.input(0).shape.elements(), row_grain(1), compute);
  }
};

}  // namespace

CpuKernel sigmoid_gate_cpu_kernel(const OpView& op) {
  return select_float_kernel<SigmoidGateKernel>(op.input(0).dtype);
}

CpuKernel sigmoid_gate_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<SigmoidGateGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
