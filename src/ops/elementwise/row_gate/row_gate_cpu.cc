#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/elementwise/row_gate/row_gate.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T, class Gate>
void run_row_gate(const KernelArguments& args) {
  using A = accumulation_t<T>;
  const T* x = args.in<T>(0);
  const Gate* gate = args.in<Gate>(1);
  T* y = args.out<T>(0);
  const int64_t columns = args.input(0).shape[1];
  const auto gate_rows = [=](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const A s = sigmoid(widen(gate[row]));
      const T* in = x + row * columns;
      T* out = y + row * columns;
      TROUPE_INDEPENDENT
      for (int64_t i = 0; i < columns; ++i) out[i] = T(s * widen(in[i]));
    }
  };
  args.pool->parallel_ranges(args.input(0).shape[0], row_grain(columns), gate_rows);
}

template <class T, class Gate>
void run_row_gate_gradient(const KernelArguments& args) {
  using A = accumulation_t<T>;
  const T* x = args.in<T>(0);
  const T* dy = args.in<T>(1);
  const Gate* gate = args.in<Gate>(2);
  T* dx = args.out<T>(0);
  Gate* d_gate = args.out<Gate>(1);
  const int64_t columns = args.input(0).shape[1];
  const auto differentiate_rows = [=](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const A s = sigmoid(widen(gate[row]));
      const T* in = x + row * columns;
      const T* out = dy + row * columns;
      T* d_in = dx + row * columns;
      // First, since dx may be stored over dy.
      d_gate[row] = Gate(s * (A(1) - s) * dot(in, out, columns));
      TROUPE_INDEPENDENT
      for (int64_t i = 0; i < columns; ++i) d_in[i] = T(s * widen(out[i]));
    }
  };
  args.pool->parallel_ranges(args.input(0).shape[0], row_grain(columns), differentiate_rows);
}

template <class T>
struct RowGateKernel {
  static void run(const KernelArguments& args) { run_row_gate<T, T>(args); }
};

template <class T>
struct RowGateAccumulationKernel {
  static void run(const KernelArguments& args) { run_row_gate<T, accumulation_t<T>>(args); }
};

template <class T>
struct RowGateGradientKernel {
  static void run(const KernelArguments& args) { run_row_gate_gradient<T, T>(args); }
};

template <class T>
struct RowGateGradientAccumulationKernel {
  static void run(const KernelArguments& args) {
    run_row_gate_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

CpuKernel row_gate_cpu_kernel(const OpView& op) {
  const DType dtype = op.input(0).dtype;
  return op.input(1).dtype == dtype ? select_float_kernel<RowGateKernel>(dtype)
                                    : select_float_kernel<RowGateAccumulationKernel>(dtype);
}

CpuKernel row_gate_gradient_cpu_kernel(const OpView& op) {
  const DType dtype = op.input(0).dtype;
  return op.input(2).dtype == dtype ? select_float_kernel<RowGateGradientKernel>(dtype)
                                    : select_float_kernel<RowGateGradientAccumulationKernel>(dtype);
}

}  // namespace troupe
