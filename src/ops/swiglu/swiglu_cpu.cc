#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/swiglu/swiglu.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// 16 k gated elements: some 15 us of exponentials.
int64_t swiglu_row_grain(int64_t f) {
  return std::max<int64_t>(1, 16384 / f);
}

constexpr int64_t kSwigluBlock = 512;

template <class T>
struct SwigluKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* gate_up = args.in<T>(0);
    const A* weights = args.in<A>(1);
    const int32_t* row_slot = args.in<int32_t>(2);
    T* y = args.out<T>(0);
    const int64_t f = args.output(0).shape[1];
    const int64_t slots = weights != nullptr ? args.input(1).shape.elements() : 0;
    const auto activate_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        A weight = 1;
        if (weights != nullptr) {
          const int64_t slot = row_slot[row];
          weight = slot >= 0 && slot < slots ? weights[slot] : A(0);
        }
        const T* gate = gate_up + row * 2 * f;
        const T* up = gate + f;
        T* out = y + row * f;
        TROUPE_INDEPENDENT
        for (int64_t i = 0; i < f; ++i) {
          const A g = widen(gate[i]);
          out[i] = T(g * sigmoid(g) * widen(up[i]) * weight);
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), swiglu_row_grain(f), activate_rows);
  }
};

template <class T>
struct SwigluGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* gate_up = args.in<T>(0);
    const T* dy = args.in<T>(1);
    const A* weights = args.in<A>(2);
    const int32_t* row_slot = args.in<int32_t>(3);
    T* d_gate_up = args.out<T>(0);
    A* d_weights = weights != nullptr ? args.out<A>(1) : nullptr;
    const int64_t f = args.input(1).shape[1];
    const int64_t slots = weights != nullptr ? args.input(2).shape.elements() : 0;
    std::fill_n(d_weights, slots, A(0));
    const auto differentiate_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = gate_up + row * 2 * f;
        const T* up = gate + f;
        const T* out = dy + row * f;
        const int64_t slot = weights != nullptr ? row_slot[row] : -1;
        const bool known = slot >= 0 && slot < slots;
        const A weight = weights == nullptr ? A(1) : known ? weights[slot] : A(0);
        T* d_gate = d_gate_up + row * 2 * f;
        T* d_up = d_gate + f;
        // Blocks, so that the terms of the weight's gradient stay in the nearest cache and one
        // exponential serves all three gradients.
        A sum = 0;
        for (int64_t start = 0; start < f; start += kSwigluBlock) {
          const int64_t count = std::min(kSwigluBlock, f - start);
          A terms[kSwigluBlock];
          TROUPE_INDEPENDENT
          for (int64_t i = 0; i < count; ++i) {
            const A g = widen(gate[start + i]);
            const A u = widen(up[start + i]);
            const A d = widen(out[start + i]);
            const A s = sigmoid(g);
            const A silu = g * s;
            terms[i] = silu * u * d;
            d_gate[start + i] = T(d * weight * u * s * (A(1) + g * (A(1) - s)));
            d_up[start + i] = T(d * weight * silu);
          }
          if (known) sum += lane_sum<A>(count, [&](int64_t i) { return terms[i]; });
        }
        if (known) d_weights[slot] = sum;
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), swiglu_row_grain(f), differentiate_rows);
  }
};

}  // namespace

CpuKernel swiglu_cpu_kernel(const OpView& op) {
  return select_float_kernel<SwigluKernel>(op.output(0).dtype);
}

CpuKernel swiglu_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<SwigluGradientKernel>(op.output(0).dtype);
}

}  // namespace troupe
