#include "ops/activation/activation.h"
#include "ops/cuda/device.cuh"

namespace troupe {
namespace {

// The functions, as in activation_cpu.cc: phi(x), and its derivative.
template <class A>
struct ValueAndSlope {
  A value;
  A slope;
};

template <ActivationFunction function, class A>
__device__ __forceinline__ ValueAndSlope<A> evaluate(A x) {
  if constexpr (function == ActivationFunction::silu) {
    const A s = sigmoid(x);
    return {x * s, s * (A(1) + x * (A(1) - s))};
  } else if constexpr (function == ActivationFunction::gelu) {
    const A cumulative = A(0.5) * erfc(x * A(-0.70710678118654752440));
    const A density = A(0.39894228040143267794) * exp(A(-0.5) * x * x);
    return {x * cumulative, cumulative + x * density};
  } else if constexpr (function == ActivationFunction::gelu_tanh) {
    constexpr A kLinear = A(1.5957691216057308);  // 2 sqrt(2 / pi)
    constexpr A kCubic = A(0.044715) * kLinear;
    const A square = x * x;
    const A s = sigmoid(x * (kLinear + kCubic * square));
    return {x * s, s * (A(1) + x * (A(1) - s) * (kLinear + A(3) * kCubic * square))};
  } else if constexpr (function == ActivationFunction::quick_gelu) {
    const A scaled = A(1.702) * x;
    const A s = sigmoid(scaled);
    return {x * s, s * (A(1) + scaled * (A(1) - s))};
  } else if constexpr (function == ActivationFunction::relu) {
    return {x < A(0) ? A(0) : x, x > A(0) ? A(1) : A(0)};  // NaN stays NaN
  } else {
    const A positive = x < A(0) ? A(0) : x;
    return {positive * positive, A(2) * positive};
  }
}

// Calls body with the function as a constant.
template <class A>
__device__ __forceinline__ ValueAndSlope<A> evaluate(ActivationFunction function, A x) {
  switch (function) {
    case ActivationFunction::silu:
      return evaluate<ActivationFunction::silu>(x);
    case ActivationFunction::gelu:
      return evaluate<ActivationFunction::gelu>(x);
    case ActivationFunction::gelu_tanh:
      return evaluate<ActivationFunction::gelu_tanh>(x);
    case ActivationFunction::quick_gelu:
      return evaluate<ActivationFunction::quick_gelu>(x);
    case ActivationFunction::relu:
      return evaluate<ActivationFunction::relu>(x);
    default:
      return evaluate<ActivationFunction::squared_relu>(x);
  }
}

// Clamp and offset of the halves of a gated row.
template <class A>
struct Halves {
  A bound;
  A offset;

  explicit Halves(const ActivationAttributes& attributes)
      : bound(attributes.clamp > 0 ? static_cast<A>(attributes.clamp) : static_cast<A>(INFINITY)),
        offset(static_cast<A>(attributes.linear_offset)) {}
  __device__ A gate(A g) const { return g > bound ? bound : g; }
  __device__ bool clamps_gate(A g) const { return g > bound; }
  __device__ A linear(A u) const {
    const A below = u > bound ? bound : u;
    return (below < -bound ? -bound : below) + offset;
  }
  __device__ bool clamps_linear(A u) const { return u > bound || u < -bound; }
};

// The router's weight of each row.
template <class A>
struct RowWeights {
  const A* weights;  // nullptr: all are 1
  const int32_t* row_slot;
  int64_t slots;

  __device__ bool is_filler(int64_t row) const {
    return weights != nullptr && (row_slot[row] < 0 || row_slot[row] >= slots);
  }
  __device__ A of(int64_t row) const { return weights != nullptr ? weights[row_slot[row]] : A(1); }
};

// A block for each row.
template <class T, int kStep>
__global__ void activation_kernel(const T* x, RowWeights<accumulation_t<T>> weights, T* y,
                                  LiveRows rows, int64_t f, ActivationFunction function, bool gated,
                                  Halves<accumulation_t<T>> halves) {
  using A = accumulation_t<T>;
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const bool filler = weights.is_filler(row);
  const A weight = filler ? A(0) : weights.of(row);
  const T* in = x + row * (gated ? 2 * f : f);
  T* out = y + row * f;
  for (int64_t i = int64_t{threadIdx.x} * kStep; i < f; i += int64_t{blockDim.x} * kStep) {
    Pack<T> result;
    if (filler) {
#pragma unroll
      for (int j = 0; j < kStep; ++j) result.values[j] = round_to<T>(A(0));
    } else if (gated) {
      const Pack<T> gate = load_step<T, kStep>(in + i);
      const Pack<T> up = load_step<T, kStep>(in + f + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        const A value = evaluate(function, halves.gate(widen(gate.values[j]))).value;
        result.values[j] = round_to<T>(value * halves.linear(widen(up.values[j])) * weight);
      }
    } else {
      const Pack<T> values = load_step<T, kStep>(in + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        result.values[j] = round_to<T>(evaluate(function, widen(values.values[j])).value * weight);
      }
    }
    store_step<T, kStep>(out + i, result);
  }
}

// dx may be x: each element of a row is read before it is written, and by the same thread.
template <class T, int kStep>
__global__ void activation_gradient_kernel(const T* x, const T* dy,
                                           RowWeights<accumulation_t<T>> weights, T* dx,
                                           accumulation_t<T>* d_weights, LiveRows rows, int64_t f,
                                           ActivationFunction function, bool gated,
                                           Halves<accumulation_t<T>> halves) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const bool filler = weights.is_filler(row);
  const A weight = filler ? A(0) : weights.of(row);
  const int64_t width = gated ? 2 * f : f;
  const T* in = x + row * width;
  const T* d_out = dy + row * f;
  T* d_in = dx + row * width;
  A sum = 0;
  for (int64_t i = int64_t{threadIdx.x} * kStep; i < f; i += int64_t{blockDim.x} * kStep) {
    Pack<T> d_gate;
    Pack<T> d_up;
    if (filler) {
#pragma unroll
      for (int j = 0; j < kStep; ++j) d_gate.values[j] = d_up.values[j] = round_to<T>(A(0));
    } else {
      const Pack<T> gates = load_step<T, kStep>(in + i);
      const Pack<T> ups = gated ? load_step<T, kStep>(in + f + i) : gates;
      const Pack<T> ds = load_step<T, kStep>(d_out + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        const A g = widen(gates.values[j]);
        const A d = widen(ds.values[j]);
        if (gated) {
          const A u = widen(ups.values[j]);
          const A linear = halves.linear(u);
          const ValueAndSlope<A> phi = evaluate(function, halves.gate(g));
          sum += phi.value * linear * d;
          d_gate.values[j] =
              round_to<T>(halves.clamps_gate(g) ? A(0) : d * weight * linear * phi.slope);
          d_up.values[j] = round_to<T>(halves.clamps_linear(u) ? A(0) : d * weight * phi.value);
        } else {
          const ValueAndSlope<A> phi = evaluate(function, g);
          sum += phi.value * d;
          d_gate.values[j] = round_to<T>(d * weight * phi.slope);
        }
      }
    }
    store_step<T, kStep>(d_in + i, d_gate);
    if (gated) store_step<T, kStep>(d_in + f + i, d_up);
  }
  if (d_weights == nullptr || filler) return;
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) d_weights[weights.row_slot[row]] = sum;
}

template <class A>
RowWeights<A> row_weights(const CudaKernelArguments& args, int i) {
  const A* weights = args.in<A>(i);
  return {weights, args.in<int32_t>(i + 1),
          weights != nullptr ? args.input(i).shape.elements() : 0};
}

template <class T>
struct ActivationCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<ActivationAttributes>();
    const Shape& y = args.output(0).shape;
    const bool packs = y[1] % Pack<T>::kElements == 0;
    launch(args,
           {static_cast<unsigned>(y[0]), threads_for_row(y[1], packs ? Pack<T>::kElements : 1)},
           packs ? activation_kernel<T, Pack<T>::kElements> : activation_kernel<T, 1>,
           args.in<T>(0), row_weights<A>(args, 1), args.out<T>(0), LiveRows(args.input(0)), y[1],
           attributes.function, attributes.gated, Halves<A>(attributes));
  }
};

template <class T>
struct ActivationGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<ActivationAttributes>();
    const Shape& dy = args.input(1).shape;
    const bool packs = dy[1] % Pack<T>::kElements == 0;
    A* d_weights = nullptr;
    if (args.in<A>(2) != nullptr) {
      d_weights = args.out<A>(1);  // slots without a row get 0
      clear(args, d_weights, static_cast<size_t>(args.output(1).shape.elements()) * sizeof(A));
    }
    launch(args,
           {static_cast<unsigned>(dy[0]), threads_for_row(dy[1], packs ? Pack<T>::kElements : 1)},
           packs ? activation_gradient_kernel<T, Pack<T>::kElements>
                 : activation_gradient_kernel<T, 1>,
           args.in<T>(0), args.in<T>(1), row_weights<A>(args, 2), args.out<T>(0), d_weights,
           LiveRows(args.input(0)), dy[1], attributes.function, attributes.gated,
           Halves<A>(attributes));
  }
};

}  // namespace

CudaKernel activation_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<ActivationCuda>(op.output(0).dtype);
}

CudaKernel activation_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<ActivationGradientCuda>(op.output(0).dtype);
}

}  // namespace troupe
