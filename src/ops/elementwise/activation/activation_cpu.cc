#include <algorithm>
#include <limits>

#include "ops/cpu/vector.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/exchange/coded_rows/coded_block_cpu.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// 16 k elements of the result: some 15 us of exponentials.
int64_t activation_row_grain(int64_t f) {
  return std::max<int64_t>(1, 16384 / f);
}

// The terms of a weight's gradient are kept in blocks that stay in the nearest cache.
constexpr int64_t kActivationBlock = 512;

// The functions. value(x) is phi(x); gradient(x, d, value) sets `value` to phi(x) and returns
// d phi'(x).
struct Silu {
  template <class A>
  static A value(A x) {
    return x * sigmoid(x);
  }
  template <class A>
  static A gradient(A x, A d, A& value) {
    const A s = sigmoid(x);
    value = x * s;
    return d * s * (A(1) + x * (A(1) - s));
  }
};

struct Gelu {
  template <class A>
  static A value(A x) {
    return x * normal_distribution(x).cumulative;
  }
  template <class A>
  static A gradient(A x, A d, A& value) {
    const NormalDistribution<A> normal = normal_distribution(x);
    value = x * normal.cumulative;
    return d * (normal.cumulative + x * normal.density);
  }
};

// (1 + tanh z) / 2 = sigma(2 z): no cancellation for negative z, and one exponential.
struct GeluTanh {
  template <class A>
  static A value(A x) {
    return x * sigmoid(x * (kLinear<A> + kCubic<A> * (x * x)));
  }
  template <class A>
  static A gradient(A x, A d, A& value) {
    const A square = x * x;
    const A s = sigmoid(x * (kLinear<A> + kCubic<A> * square));
    value = x * s;
    return d * s * (A(1) + x * (A(1) - s) * (kLinear<A> + A(3) * kCubic<A> * square));
  }

 private:
  template <class A>
  static constexpr A kLinear = A(1.5957691216057308);  // 2 sqrt(2 / pi)
  template <class A>
  static constexpr A kCubic = A(0.044715) * kLinear<A>;
};

struct QuickGelu {
  template <class A>
  static A value(A x) {
    return x * sigmoid(A(1.702) * x);
  }
  template <class A>
  static A gradient(A x, A d, A& value) {
    const A scaled = A(1.702) * x;
    const A s = sigmoid(scaled);
    value = x * s;
    return d * s * (A(1) + scaled * (A(1) - s));
  }
};

// NaN stays NaN, so that a broken step is noticed.
struct Relu {
  template <class A>
  static A value(A x) {
    return x < A(0) ? A(0) : x;
  }
  template <class A>
  static A gradient(A x, A d, A& value) {
    value = Relu::value(x);
    return x > A(0) ? d : A(0);
  }
};

struct SquaredRelu {
  template <class A>
  static A value(A x) {
    const A positive = Relu::value(x);
    return positive * positive;
  }
  template <class A>
  static A gradient(A x, A d, A& value) {
    const A positive = Relu::value(x);
    value = positive * positive;
    return d * (A(2) * positive);
  }
};

// What happens to the halves of a gated row before the function and the product: nothing, or clamp
// and offset. Loops are compiled for both, so that the usual case does not pay for the other.
template <class A>
struct AsTheyAre {
  explicit AsTheyAre(const ActivationAttributes&) {}

  A gate(A g) const { return g; }
  bool clamps_gate(A) const { return false; }
  A linear(A u) const { return u; }
  bool clamps_linear(A) const { return false; }
};

template <class A>
struct ClampedAndOffset {
  A bound;
  A offset;

  explicit ClampedAndOffset(const ActivationAttributes& attributes)
      : bound(attributes.clamp > 0 ? A(attributes.clamp) : std::numeric_limits<A>::infinity()),
        offset(A(attributes.linear_offset)) {}

  A gate(A g) const { return g > bound ? bound : g; }
  bool clamps_gate(A g) const { return g > bound; }
  A linear(A u) const {
    const A below = u > bound ? bound : u;
    return (below < -bound ? -bound : below) + offset;
  }
  bool clamps_linear(A u) const { return u > bound || u < -bound; }
};

// One row of the result.
template <class T>
using ActivateRow = void (*)(const ActivationAttributes& attributes, const T* x,
                             accumulation_t<T> weight, T* y, int64_t f);

template <class T, class Function>
void activate_plain_row(const ActivationAttributes&, const T* x, accumulation_t<T> weight, T* y,
                        int64_t f) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < f; ++i) y[i] = T(Function::value(widen(x[i])) * weight);
}

template <class T, class Function, template <class> class Halves>
void activate_gated_row(const ActivationAttributes& attributes, const T* gate,
                        accumulation_t<T> weight, T* y, int64_t f) {
  const Halves<accumulation_t<T>> halves(attributes);
  const T* up = gate + f;
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < f; ++i) {
    y[i] = T(Function::value(halves.gate(widen(gate[i]))) * halves.linear(widen(up[i])) * weight);
  }
}

// The gradient of one row; returns the gradient of its weight. dx may be x.
template <class T>
using DifferentiateRow = accumulation_t<T> (*)(const ActivationAttributes& attributes, const T* x,
                                               const T* dy, accumulation_t<T> weight, T* dx,
                                               int64_t f);

template <class T, class Function>
accumulation_t<T> differentiate_plain_row(const ActivationAttributes&, const T* x, const T* dy,
                                          accumulation_t<T> weight, T* dx, int64_t f) {
  using A = accumulation_t<T>;
  A sum = 0;
  for (int64_t start = 0; start < f; start += kActivationBlock) {
    const int64_t count = std::min(kActivationBlock, f - start);
    A terms[kActivationBlock];
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const A d = widen(dy[start + i]);
      A value;
      dx[start + i] = T(Function::gradient(widen(x[start + i]), d * weight, value));
      terms[i] = value * d;
    }
    sum += lane_sum<A>(count, [&](int64_t i) { return terms[i]; });
  }
  return sum;
}

template <class T, class Function, template <class> class Halves>
accumulation_t<T> differentiate_gated_row(const ActivationAttributes& attributes, const T* gate,
                                          const T* dy, accumulation_t<T> weight, T* d_gate,
                                          int64_t f) {
  using A = accumulation_t<T>;
  const Halves<A> halves(attributes);
  const T* up = gate + f;
  T* d_up = d_gate + f;
  A sum = 0;
  for (int64_t start = 0; start < f; start += kActivationBlock) {
    const int64_t count = std::min(kActivationBlock, f - start);
    A terms[kActivationBlock];
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const A g = widen(gate[start + i]);
      const A u = widen(up[start + i]);
      const A d = widen(dy[start + i]);
      const A linear = halves.linear(u);
      A value;
      const A d_g = Function::gradient(halves.gate(g), d * weight * linear, value);
      terms[i] = value * linear * d;
      d_gate[start + i] = T(halves.clamps_gate(g) ? A(0) : d_g);
      d_up[start + i] = T(halves.clamps_linear(u) ? A(0) : d * weight * value);
    }
    sum += lane_sum<A>(count, [&](int64_t i) { return terms[i]; });
  }
  return sum;
}

template <class T>
struct ActivationRows {
  ActivateRow<T> activate;
  DifferentiateRow<T> differentiate;
};

template <class T, class Function>
ActivationRows<T> rows_of_function(const ActivationAttributes& attributes) {
  if (!attributes.gated) {
    return {&activate_plain_row<T, Function>, &differentiate_plain_row<T, Function>};
  }
  if (attributes.clamp == 0 && attributes.linear_offset == 0) {
    return {&activate_gated_row<T, Function, AsTheyAre>,
            &differentiate_gated_row<T, Function, AsTheyAre>};
  }
  return {&activate_gated_row<T, Function, ClampedAndOffset>,
          &differentiate_gated_row<T, Function, ClampedAndOffset>};
}

template <class T>
ActivationRows<T> activation_rows(const ActivationAttributes& attributes) {
  switch (attributes.function) {
    case ActivationFunction::silu:
      return rows_of_function<T, Silu>(attributes);
    case ActivationFunction::gelu:
      return rows_of_function<T, Gelu>(attributes);
    case ActivationFunction::gelu_tanh:
      return rows_of_function<T, GeluTanh>(attributes);
    case ActivationFunction::quick_gelu:
      return rows_of_function<T, QuickGelu>(attributes);
    case ActivationFunction::relu:
      return rows_of_function<T, Relu>(attributes);
    case ActivationFunction::squared_relu:
      return rows_of_function<T, SquaredRelu>(attributes);
  }
  TROUPE_CHECK(false, "no such activation function");
  return {};
}

// The router's weight of each row.
template <class A>
struct RowWeights {
  const A* weights;  // nullptr: all are 1
  const int32_t* row_slot;
  int64_t slots;

  bool is_filler(int64_t row) const {
    return weights != nullptr && (row_slot[row] < 0 || row_slot[row] >= slots);
  }
  // Of a row that is no filler.
  A operator[](int64_t row) const { return weights != nullptr ? weights[row_slot[row]] : A(1); }
};

template <class T>
struct ActivationKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<ActivationAttributes>();
    const ActivateRow<T> activate = activation_rows<T>(attributes).activate;
    const RowWeights<A> weights{args.in<A>(1), args.in<int32_t>(2),
                                args.in<A>(1) != nullptr ? args.input(1).shape.elements() : 0};
    const T* x = args.in<T>(0);
    T* y = args.out<T>(0);
    const int64_t f = args.output(0).shape[1];
    const int64_t width = args.input(0).shape[1];
    uint8_t* const stored = attributes.stores_input ? args.out<uint8_t>(1) : nullptr;
    const auto activate_rows = [=, &attributes](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        if (weights.is_filler(row)) {
          std::fill_n(y + row * f, f, T());
          continue;
        }
        activate(attributes, x + row * width, weights[row], y + row * f, f);
        if (stored != nullptr) {
          encode_row(x + row * width, width, stored + row * coded_row_bytes(width));
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), activation_row_grain(f), activate_rows);
  }
};

template <class T>
struct ActivationGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<ActivationAttributes>();
    const DifferentiateRow<T> differentiate = activation_rows<T>(attributes).differentiate;
    const bool weighted = args.in<A>(2) != nullptr;
    const int64_t slots = weighted ? args.input(2).shape.elements() : 0;
    const RowWeights<A> weights{args.in<A>(2), args.in<int32_t>(3), slots};
    A* d_weights = weighted ? args.out<A>(1) : nullptr;
    std::fill_n(d_weights, slots, A(0));
    const T* dy = args.in<T>(1);
    T* dx = args.out<T>(0);
    const uint8_t* const stored = attributes.stores_input ? args.in<uint8_t>(4) : nullptr;
    // Stored rows are decoded in the place of their gradients.
    const T* x = stored != nullptr ? dx : args.in<T>(0);
    const int64_t f = args.input(1).shape[1];
    const int64_t width = args.output(0).shape[1];
    const auto differentiate_rows = [=, &attributes](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        if (weights.is_filler(row)) {
          std::fill_n(dx + row * width, width, T());
          continue;
        }
        if (stored != nullptr) {
          decode_row(stored + row * coded_row_bytes(width), width, dx + row * width);
        }
        const A d_weight = differentiate(attributes, x + row * width, dy + row * f, weights[row],
                                         dx + row * width, f);
        if (weighted) d_weights[weights.row_slot[row]] = d_weight;
      }
    };
    args.pool->parallel_ranges(args.input(1).rows(), activation_row_grain(f), differentiate_rows);
  }
};

}  // namespace

CpuKernel activation_cpu_kernel_of(DType dtype) {
  return select_float_kernel<ActivationKernel>(dtype);
}

CpuKernel activation_cpu_kernel(const OpView& op) {
  return activation_cpu_kernel_of(op.output(0).dtype);
}

CpuKernel activation_gradient_cpu_kernel_of(DType dtype) {
  return select_float_kernel<ActivationGradientKernel>(dtype);
}

CpuKernel activation_gradient_cpu_kernel(const OpView& op) {
  return activation_gradient_cpu_kernel_of(op.output(0).dtype);
}

}  // namespace troupe
