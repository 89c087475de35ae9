#include "ops/elementwise/row_gate/row_gate.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A block for each row.
template <class T, class Gate>
__global__ void row_gate_kernel(const T* x, const Gate* gate, T* y, int64_t columns) {
  const int64_t first = int64_t{blockIdx.x} * columns;
  const accumulation_t<T> s = sigmoid(widen(gate[blockIdx.x]));
  for_row(columns, [=](int64_t i) { y[first + i] = round_to<T>(s * widen(x[first + i])); });
}

// dx may be dy: each element is read for the sum and for its result before that is written.
template <class T, class Gate>
__global__ void row_gate_gradient_kernel(const T* x, const T* dy, const Gate* gate, T* dx,
                                         Gate* d_gate, int64_t columns) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t first = int64_t{blockIdx.x} * columns;
  const A s = sigmoid(widen(gate[blockIdx.x]));
  A sum = 0;
  for_row(columns, [&](int64_t i) { sum += widen(x[first + i]) * widen(dy[first + i]); });
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) d_gate[blockIdx.x] = round_to<Gate>(s * (A(1) - s) * sum);
  for_row(columns, [=](int64_t i) { dx[first + i] = round_to<T>(s * widen(dy[first + i])); });
}

template <class T, class Gate>
void run_row_gate(const CudaKernelArguments& args) {
  const Shape& shape = args.input(0).shape;
  launch(args, {static_cast<unsigned>(shape[0]), threads_for_row(shape[1], 4)},
         row_gate_kernel<T, Gate>, args.in<T>(0), args.in<Gate>(1), args.out<T>(0), shape[1]);
}

template <class T, class Gate>
void run_row_gate_gradient(const CudaKernelArguments& args) {
  const Shape& shape = args.input(0).shape;
  launch(args, {static_cast<unsigned>(shape[0]), threads_for_row(shape[1], 4)},
         row_gate_gradient_kernel<T, Gate>, args.in<T>(0), args.in<T>(1), args.in<Gate>(2),
         args.out<T>(0), args.out<Gate>(1), shape[1]);
}

template <class T>
struct RowGateCuda {
  static void run(const CudaKernelArguments& args) { run_row_gate<T, T>(args); }
};
template <class T>
struct RowGateAccumulationCuda {
  static void run(const CudaKernelArguments& args) { run_row_gate<T, accumulation_t<T>>(args); }
};
template <class T>
struct RowGateGradientCuda {
  static void run(const CudaKernelArguments& args) { run_row_gate_gradient<T, T>(args); }
};
template <class T>
struct RowGateGradientAccumulationCuda {
  static void run(const CudaKernelArguments& args) {
    run_row_gate_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

CudaKernel row_gate_cuda_kernel(const OpView& op) {
  const DType dtype = op.input(0).dtype;
  return op.input(1).dtype == dtype ? select_cuda_kernel<RowGateCuda>(dtype)
                                    : select_cuda_kernel<RowGateAccumulationCuda>(dtype);
}

CudaKernel row_gate_gradient_cuda_kernel(const OpView& op) {
  const DType dtype = op.input(0).dtype;
  return op.input(2).dtype == dtype ? select_cuda_kernel<RowGateGradientCuda>(dtype)
                                    : select_cuda_kernel<RowGateGradientAccumulationCuda>(dtype);
}

}  // namespace troupe
