#include <cmath>

#include "ops/cpu/row_sums.h"
#include "ops/cpu/vector.h"
#include "ops/norms/gated_norm/gated_norm.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
accumulation_t<T> head_rstd(const T* x, const GatedNormAttributes& attributes) {
  using A = accumulation_t<T>;
  const A mean = sum_of_squares(x, attributes.head_dim) / static_cast<A>(attributes.head_dim);
  return A(1) / std::sqrt(mean + static_cast<A>(attributes.epsilon));
}

template <class T>
struct GatedNormKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<GatedNormAttributes>();
    const T* x = args.in<T>(0);
    const T* gate = args.in<T>(1);
    const A* gamma = args.in<A>(2);
    T* y = args.out<T>(0);
    const int64_t n = attributes.head_dim;
    const auto normalize = [=](int64_t begin, int64_t end, int) {
      for (int64_t head = begin; head < end; ++head) {
        const T* in = x + head * n;
        const T* z = gate + head * n;
        T* out = y + head * n;
        const A rstd = head_rstd(in, attributes);
        TROUPE_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) {
          const A g = widen(z[i]);
          out[i] = T(widen(in[i]) * rstd * gamma[i] * g * sigmoid(g));
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).shape.elements() / n, row_grain(n), normalize);
  }
};

template <class T>
struct GatedNormGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<GatedNormAttributes>();
    const T* dy = args.in<T>(0);
    const T* x = args.in<T>(1);
    const T* gate = args.in<T>(2);
    const A* gamma = args.in<A>(3);
    T* dx = args.out<T>(0);
    T* d_gate = args.out<T>(1);
    const int64_t n = attributes.head_dim;
    const auto differentiate = [=](int64_t begin, int64_t end, int) {
      for (int64_t head = begin; head < end; ++head) {
        const T* d = dy + head * n;
        const T* in = x + head * n;
        const T* z = gate + head * n;
        const A rstd = head_rstd(in, attributes);
        const auto u = [=](int64_t i) {
          const A g = widen(z[i]);
          return widen(d[i]) * g * sigmoid(g) * gamma[i];
        };
        const A along = lane_sum<A>(n, [=](int64_t i) { return u(i) * widen(in[i]); }) * rstd *
                        rstd / static_cast<A>(n);
        for (int64_t i = 0; i < n; ++i) {
          const A g = widen(z[i]);
          const A s = sigmoid(g);
          const A value = widen(in[i]);
          const A gated = u(i);
          d_gate[head * n + i] =
              T(widen(d[i]) * value * rstd * gamma[i] * s * (A(1) + g * (A(1) - s)));
          dx[head * n + i] = T(rstd * (gated - value * along));
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).shape.elements() / n, row_grain(n), differentiate);
  }
};

template <class T>
struct GatedNormWeightGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<GatedNormAttributes>();
    const T* dy = args.in<T>(0);
    const T* x = args.in<T>(1);
    const T* gate = args.in<T>(2);
    const Shape& shape = args.input(0).shape;
    const int64_t columns = shape[1];
    const int64_t n = attributes.head_dim;
    sum_rows(*args.pool, row_pieces(shape[0], columns), shape[0], n,
             reinterpret_cast<A*>(args.workspace), attributes.accumulate, args.out<A>(0),
             [=](int64_t row, A* partial) {
               for (int64_t first = row * columns; first < (row + 1) * columns; first += n) {
                 const A rstd = head_rstd(x + first, attributes);
                 TROUPE_INDEPENDENT
                 for (int64_t i = 0; i < n; ++i) {
                   const A g = widen(gate[first + i]);
                   partial[i] += widen(dy[first + i]) * g * sigmoid(g) * widen(x[first + i]) * rstd;
                 }
               }
             });
  }
};

}  // namespace

CpuKernel gated_norm_cpu_kernel(const OpView& op) {
  return select_float_kernel<GatedNormKernel>(op.input(0).dtype);
}

CpuKernel gated_norm_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<GatedNormGradientKernel>(op.input(0).dtype);
}

CpuKernel gated_norm_weight_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<GatedNormWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
