#include "ops/attention/delta_gates/delta_gates.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// log(1 + e^x) without overflow.
template <class A>
__device__ __forceinline__ A softplus(A x) {
  return (x > A(0) ? x : A(0)) + log1p(exp(-fabs(x)));
}

// A thread for each row and head.
template <class T>
__global__ void delta_gates_kernel(const T* x, const accumulation_t<T>* decay_log,
                                   const accumulation_t<T>* bias, accumulation_t<T>* gates,
                                   int64_t rows, DeltaGatesAttributes attributes) {
  using A = accumulation_t<T>;
  const int64_t heads = attributes.heads;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= rows * heads) return;
  const int64_t head = i % heads;
  const int64_t first = i / heads * 2 * heads;
  const int64_t column = first + attributes.column(head);
  const A a = widen(x[column + attributes.group_heads]);
  gates[first + head] = sigmoid(widen(x[column]));
  gates[first + heads + head] = -exp(decay_log[head]) * softplus(a + bias[head]);
}

template <class T>
__global__ void delta_gates_gradient_kernel(const accumulation_t<T>* d_gates, const T* x,
                                            const accumulation_t<T>* decay_log,
                                            const accumulation_t<T>* bias, T* dx, int64_t rows,
                                            DeltaGatesAttributes attributes) {
  using A = accumulation_t<T>;
  const int64_t heads = attributes.heads;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= rows * heads) return;
  const int64_t head = i % heads;
  const int64_t first = i / heads * 2 * heads;
  const int64_t column = first + attributes.column(head);
  const A beta = sigmoid(widen(x[column]));
  const A a = widen(x[column + attributes.group_heads]);
  dx[column] = round_to<T>(d_gates[first + head] * beta * (A(1) - beta));
  dx[column + attributes.group_heads] =
      round_to<T>(-d_gates[first + heads + head] * exp(decay_log[head]) * sigmoid(a + bias[head]));
}

// A block for each head.
template <class T>
__global__ void delta_gates_parameter_gradient_kernel(
    const accumulation_t<T>* d_gates, const T* x, const accumulation_t<T>* decay_log,
    const accumulation_t<T>* bias, accumulation_t<T>* gradient, int64_t rows,
    DeltaGatesParameterGradientAttributes attributes) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t heads = attributes.gates.heads;
  const int64_t head = blockIdx.x;
  const int64_t column = attributes.gates.column(head) + attributes.gates.group_heads;
  A sum = 0;
  for_row(rows, [&](int64_t row) {
    const A a = widen(x[row * 2 * heads + column]) + bias[head];
    sum +=
        d_gates[row * 2 * heads + heads + head] * (attributes.of_bias ? sigmoid(a) : softplus(a));
  });
  sum = -exp(decay_log[head]) * block_sum(sum, shared);
  if (threadIdx.x == 0) gradient[head] = (attributes.accumulate ? gradient[head] : A(0)) + sum;
}

Launch gates_launch(const Shape& x) {
  return {static_cast<unsigned>(std::max<int64_t>(1, ceil_divide(x.elements() / 2, 256))), 256};
}

template <class T>
struct DeltaGatesCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& x = args.input(0).shape;
    launch(args, gates_launch(x), delta_gates_kernel<T>, args.in<T>(0), args.in<A>(1),
           args.in<A>(2), args.out<A>(0), x[0], args.attributes->as<DeltaGatesAttributes>());
  }
};

template <class T>
struct DeltaGatesGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& x = args.input(1).shape;
    launch(args, gates_launch(x), delta_gates_gradient_kernel<T>, args.in<A>(0), args.in<T>(1),
           args.in<A>(2), args.in<A>(3), args.out<T>(0), x[0],
           args.attributes->as<DeltaGatesAttributes>());
  }
};

template <class T>
struct DeltaGatesParameterGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<DeltaGatesParameterGradientAttributes>();
    launch(args, {static_cast<unsigned>(attributes.gates.heads), 1024},
           delta_gates_parameter_gradient_kernel<T>, args.in<A>(0), args.in<T>(1), args.in<A>(2),
           args.in<A>(3), args.out<A>(0), args.input(1).shape[0], attributes);
  }
};

}  // namespace

CudaKernel delta_gates_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<DeltaGatesCuda>(op.input(0).dtype);
}

CudaKernel delta_gates_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<DeltaGatesGradientCuda>(op.input(1).dtype);
}

CudaKernel delta_gates_parameter_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<DeltaGatesParameterGradientCuda>(op.input(1).dtype);
}

}  // namespace troupe
