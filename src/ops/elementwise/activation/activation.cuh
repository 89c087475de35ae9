// The arithmetic of activations on GPUs, a step of a row at a time, for kernels that differ in
// where rows come from and go to: the activation's own, and those that quantise what they make
// (ops/precision/quantize_activation).
//
// Device functions, and what launches give them.
#pragma once

#include "ops/cuda/row_weights.cuh"
#include "ops/elementwise/activation/activation.h"
#include "program/cuda/device.cuh"

namespace troupe {

// The functions, as in activation_cpu.cc: phi(x), and its derivative.
template <class A>
struct ValueAndSlope {
  A value;
  A slope;
};

// With elements of 2 bytes the exponential and the division are the GPU's own, which are off by
// 2^-21: that is far less than the elements' rounding.
template <class T, class A>
__device__ __forceinline__ A sigmoid_for(A x) {
  if constexpr (sizeof(T) == 2) {
    constexpr float kLog2E = 1.4426950408889634F;
    float power;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0F + power));
    return result;
  }
  return sigmoid(x);
}

template <ActivationFunction function, class T>
__device__ __forceinline__ ValueAndSlope<accumulation_t<T>> evaluate(accumulation_t<T> x) {
  using A = accumulation_t<T>;
  if constexpr (function == ActivationFunction::silu) {
    const A s = sigmoid_for<T>(x);
    return {x * s, s * (A(1) + x * (A(1) - s))};
  } else if constexpr (function == ActivationFunction::gelu) {
    const A cumulative = A(0.5) * erfc(x * A(-0.70710678118654752440));
    const A density = A(0.39894228040143267794) * exp(A(-0.5) * x * x);
    return {x * cumulative, cumulative + x * density};
  } else if constexpr (function == ActivationFunction::gelu_tanh) {
    constexpr A kLinear = A(1.5957691216057308);  // 2 sqrt(2 / pi)
    constexpr A kCubic = A(0.044715) * kLinear;
    const A square = x * x;
    const A s = sigmoid_for<T>(x * (kLinear + kCubic * square));
    return {x * s, s * (A(1) + x * (A(1) - s) * (kLinear + A(3) * kCubic * square))};
  } else if constexpr (function == ActivationFunction::quick_gelu) {
    const A scaled = A(1.702) * x;
    const A s = sigmoid_for<T>(scaled);
    return {x * s, s * (A(1) + scaled * (A(1) - s))};
  } else if constexpr (function == ActivationFunction::relu) {
    return {x < A(0) ? A(0) : x, x > A(0) ? A(1) : A(0)};  // NaN stays NaN
  } else {
    const A positive = x < A(0) ? A(0) : x;
    return {positive * positive, A(2) * positive};
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

// A step of a row of the result. `slot`: RowWeights::slot, `weight` of it. Without gate, what it is
// computed from is in `gates`.
template <ActivationFunction function, class T, int kStep>
__device__ __forceinline__ Pack<T> activate_step(const Pack<T>& gates, const Pack<T>& ups,
                                                 bool gated,
                                                 const Halves<accumulation_t<T>>& halves,
                                                 int64_t slot, accumulation_t<T> weight) {
  using A = accumulation_t<T>;
  Pack<T> result;
#pragma unroll
  for (int j = 0; j < kStep; ++j) {
    const A g = widen(gates.values[j]);
    const A value =
        gated ? evaluate<function, T>(halves.gate(g)).value * halves.linear(widen(ups.values[j]))
              : evaluate<function, T>(g).value;
    result.values[j] = round_to<T>(slot < 0 ? A(0) : value * weight);
  }
  return result;
}

// A step of the gradient of a row, given that of the result; `sum` grows by its part of the
// gradient of the row's weight.
template <ActivationFunction function, class T, int kStep>
__device__ __forceinline__ void differentiate_step(const Pack<T>& gates, const Pack<T>& ups,
                                                   const Pack<T>& ds, bool gated,
                                                   const Halves<accumulation_t<T>>& halves,
                                                   int64_t slot, accumulation_t<T> weight,
                                                   Pack<T>& d_gate, Pack<T>& d_up,
                                                   accumulation_t<T>& sum) {
  using A = accumulation_t<T>;
#pragma unroll
  for (int j = 0; j < kStep; ++j) {
    const A g = widen(gates.values[j]);
    const A d = widen(ds.values[j]);
    if (gated) {
      const A u = widen(ups.values[j]);
      const A linear = halves.linear(u);
      const auto phi = evaluate<function, T>(halves.gate(g));
      sum += phi.value * linear * d;
      const bool none = slot < 0;
      d_gate.values[j] =
          round_to<T>(none || halves.clamps_gate(g) ? A(0) : d * weight * linear * phi.slope);
      d_up.values[j] = round_to<T>(none || halves.clamps_linear(u) ? A(0) : d * weight * phi.value);
    } else {
      const auto phi = evaluate<function, T>(g);
      sum += phi.value * d;
      d_gate.values[j] = round_to<T>(slot < 0 ? A(0) : d * weight * phi.slope);
    }
  }
}

// Calls run with the function as a type's constant.
template <class Run>
void with_function(ActivationFunction function, const Run& run) {
  const auto call = [&]<ActivationFunction constant> {
    run(std::integral_constant<ActivationFunction, constant>());
  };
  switch (function) {
    case ActivationFunction::silu:
      return call.template operator()<ActivationFunction::silu>();
    case ActivationFunction::gelu:
      return call.template operator()<ActivationFunction::gelu>();
    case ActivationFunction::gelu_tanh:
      return call.template operator()<ActivationFunction::gelu_tanh>();
    case ActivationFunction::quick_gelu:
      return call.template operator()<ActivationFunction::quick_gelu>();
    case ActivationFunction::relu:
      return call.template operator()<ActivationFunction::relu>();
    case ActivationFunction::squared_relu:
      return call.template operator()<ActivationFunction::squared_relu>();
  }
}

}  // namespace troupe
