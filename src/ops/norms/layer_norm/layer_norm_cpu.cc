#include <algorithm>
#include <cmath>

#include "ops/cpu/norm_rows.h"
#include "ops/cpu/row_sums.h"
#include "ops/cpu/vector.h"
#include "ops/norms/layer_norm/layer_norm.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
struct LayerNormKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<LayerNormAttributes>();
    const A epsilon = static_cast<A>(attributes.epsilon);
    const A offset = attributes.zero_centered ? A(1) : A(0);
    const A* gamma = args.in<A>(1);
    const A* beta = args.in<A>(2);
    const T* delta = args.in<T>(3);
    T* out = args.out<T>(0);
    A* means = args.out<A>(1);
    A* rstds = args.out<A>(2);
    T* sums = delta != nullptr ? args.out<T>(3) : nullptr;
    const int64_t n = args.input(0).shape[1];
    const auto normalize = [=](int64_t row, const auto& element) {
      const A mean = lane_sum<A>(n, element) / static_cast<A>(n);
      const A variance = lane_sum<A>(n,
                                     [&](int64_t i) {
                                       const A centered = element(i) - mean;
                                       return centered * centered;
                                     }) /
                         static_cast<A>(n);
      const A rstd = A(1) / std::sqrt(variance + epsilon);
      means[row] = mean;
      rstds[row] = rstd;
      T* y = out + row * n;
      TROUPE_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) {
        y[i] = T((element(i) - mean) * rstd * (offset + gamma[i]) + beta[i]);
      }
    };
    for_each_norm_row(args, delta, sums, normalize);
  }
};

// With g_i = dy_i gamma_i (or dy_i (1 + gamma_i)) and z_i = (s_i - mean) rstd:
//   dx_i = d_s_i + rstd (g_i - mean of g - z_i mean of g z)
template <class T>
struct LayerNormGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const A offset = args.attributes->as<LayerNormAttributes>().zero_centered ? A(1) : A(0);
    const T* d_out = args.in<T>(0);
    const T* sums = args.in<T>(1);
    const A* gamma = args.in<A>(2);
    const A* means = args.in<A>(3);
    const A* rstds = args.in<A>(4);
    const T* d_sums = args.in<T>(5);
    T* d_in = args.out<T>(0);
    const int64_t n = args.input(0).shape[1];
    const auto differentiate_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* dy = d_out + row * n;
        const T* s = sums + row * n;
        T* dx = d_in + row * n;
        const A mean = means[row];
        const A rstd = rstds[row];
        const A g_mean =
            lane_sum<A>(n, [=](int64_t i) { return widen(dy[i]) * (offset + gamma[i]); }) /
            static_cast<A>(n);
        const A along =
            lane_sum<A>(n,
                        [=](int64_t i) {
                          return widen(dy[i]) * (offset + gamma[i]) * ((widen(s[i]) - mean) * rstd);
                        }) /
            static_cast<A>(n);
        const auto gradient = [=](int64_t i) {
          const A g = widen(dy[i]) * (offset + gamma[i]);
          return rstd * (g - g_mean - (widen(s[i]) - mean) * rstd * along);
        };
        if (d_sums != nullptr) {
          const T* base = d_sums + row * n;
          TROUPE_INDEPENDENT
          for (int64_t i = 0; i < n; ++i) dx[i] = T(widen(base[i]) + gradient(i));
        } else {
          TROUPE_INDEPENDENT
          for (int64_t i = 0; i < n; ++i) dx[i] = T(gradient(i));
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), row_grain(n), differentiate_rows);
  }
};

template <class T>
struct LayerNormWeightGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* d_out = args.in<T>(0);
    const T* sums = args.in<T>(1);
    const A* means = args.in<A>(2);
    const A* rstds = args.in<A>(3);
    const int64_t n = args.input(0).shape[1];
    sum_rows(*args.pool, row_pieces(args.input(0).shape[0], n), args.input(0).rows(), n,
             reinterpret_cast<A*>(args.workspace),
             args.attributes->as<LayerNormWeightGradientAttributes>().accumulate, args.out<A>(0),
             [=](int64_t row, A* partial) {
               const T* dy = d_out + row * n;
               const T* s = sums + row * n;
               const A mean = means[row];
               const A rstd = rstds[row];
               TROUPE_INDEPENDENT
               for (int64_t i = 0; i < n; ++i) {
                 partial[i] += widen(dy[i]) * ((widen(s[i]) - mean) * rstd);
               }
             });
  }
};

template <class T>
struct LayerNormBiasGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* dy = args.in<T>(0);
    const int64_t n = args.input(0).shape[1];
    sum_rows(*args.pool, row_pieces(args.input(0).shape[0], n), args.input(0).rows(), n,
             reinterpret_cast<A*>(args.workspace),
             args.attributes->as<LayerNormBiasGradientAttributes>().accumulate, args.out<A>(0),
             [=](int64_t row, A* partial) { add_to(dy + row * n, partial, n); });
  }
};

}  // namespace

CpuKernel layer_norm_cpu_kernel(const OpView& op) {
  return select_float_kernel<LayerNormKernel>(op.output(0).dtype);
}

CpuKernel layer_norm_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<LayerNormGradientKernel>(op.output(0).dtype);
}

CpuKernel layer_norm_weight_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<LayerNormWeightGradientKernel>(op.input(0).dtype);
}

CpuKernel layer_norm_bias_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<LayerNormBiasGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
