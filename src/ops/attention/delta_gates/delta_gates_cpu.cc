#include <cmath>

#include "ops/attention/delta_gates/delta_gates.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// log(1 + e^x) without overflow.
template <class A>
A softplus(A x) {
  return (x > A(0) ? x : A(0)) + std::log1p(std::exp(-std::abs(x)));
}

template <class T>
struct DeltaGatesKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<DeltaGatesAttributes>();
    const T* x = args.in<T>(0);
    const A* decay_log = args.in<A>(1);
    const A* bias = args.in<A>(2);
    A* gates = args.out<A>(0);
    const int64_t heads = attributes.heads;
    const auto compute = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = x + row * 2 * heads;
        A* out = gates + row * 2 * heads;
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t column = attributes.column(head);
          const A a = widen(in[column + attributes.group_heads]);
          out[head] = sigmoid(widen(in[column]));
          out[heads + head] = -std::exp(decay_log[head]) * softplus(a + bias[head]);
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).shape[0], row_grain(2 * heads), compute);
  }
};

template <class T>
struct DeltaGatesGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<DeltaGatesAttributes>();
    const A* d_gates = args.in<A>(0);
    const T* x = args.in<T>(1);
    const A* decay_log = args.in<A>(2);
    const A* bias = args.in<A>(3);
    T* dx = args.out<T>(0);
    const int64_t heads = attributes.heads;
    const auto compute = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = x + row * 2 * heads;
        const A* d = d_gates + row * 2 * heads;
        T* out = dx + row * 2 * heads;
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t column = attributes.column(head);
          const A beta = sigmoid(widen(in[column]));
          const A a = widen(in[column + attributes.group_heads]);
          out[column] = T(d[head] * beta * (A(1) - beta));
          out[column + attributes.group_heads] =
              T(-d[heads + head] * std::exp(decay_log[head]) * sigmoid(a + bias[head]));
        }
      }
    };
    args.pool->parallel_ranges(args.input(1).shape[0], row_grain(2 * heads), compute);
  }
};

template <class T>
struct DeltaGatesParameterGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<DeltaGatesParameterGradientAttributes>();
    const A* d_gates = args.in<A>(0);
    const T* x = args.in<T>(1);
    const A* decay_log = args.in<A>(2);
    const A* bias = args.in<A>(3);
    A* gradient = args.out<A>(0);
    const int64_t rows = args.input(1).shape[0];
    const int64_t heads = attributes.gates.heads;
    args.pool->parallel_for(heads, [=](int64_t head, int) {
      const int64_t column = attributes.gates.column(head) + attributes.gates.group_heads;
      const A sum = lane_sum<A>(rows, [=](int64_t row) {
        const A a = widen(x[row * 2 * heads + column]) + bias[head];
        return d_gates[row * 2 * heads + heads + head] *
               (attributes.of_bias ? sigmoid(a) : softplus(a));
      });
      gradient[head] =
          (attributes.accumulate ? gradient[head] : A(0)) - std::exp(decay_log[head]) * sum;
    });
  }
};

}  // namespace

CpuKernel delta_gates_cpu_kernel(const OpView& op) {
  return select_float_kernel<DeltaGatesKernel>(op.input(0).dtype);
}

CpuKernel delta_gates_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<DeltaGatesGradientKernel>(op.input(1).dtype);
}

CpuKernel delta_gates_parameter_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<DeltaGatesParameterGradientKernel>(op.input(1).dtype);
}

}  // namespace troupe
