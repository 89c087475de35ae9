#include <algorithm>

#include "ops/cpu/norm_rows.h"
#include "ops/cpu/row_sums.h"
#include "ops/cpu/vector.h"
#include "ops/norms/rms_norm/rms_norm.h"
#include "ops/norms/rms_norm/rms_row.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
struct RmsNormKernel {
  static void run(const KernelArguments& args) {
    const auto attributes = args.attributes->as<RmsNormAttributes>();
    const accumulation_t<T>* gamma = args.in<accumulation_t<T>>(1);
    const T* delta = args.in<T>(2);
    T* y = args.out<T>(0);
    accumulation_t<T>* rstd = args.out<accumulation_t<T>>(1);
    T* sum = delta != nullptr ? args.out<T>(2) : nullptr;
    const int64_t n = args.input(0).shape[1];
    const auto normalize = [=](int64_t row, const auto& element) {
      rstd[row] = rms_reciprocal<accumulation_t<T>>(element, n, attributes.epsilon);
      rms_scale(element, rstd[row], gamma, attributes.zero_centered, y + row * n, n);
    };
    for_each_norm_row(args, delta, sum, normalize);
  }
};

template <class T>
struct RmsNormGradientKernel {
  static void run(const KernelArguments& args) {
    const bool zero_centered = args.attributes->as<RmsNormAttributes>().zero_centered;
    const T* dy = args.in<T>(0);
    const T* s = args.in<T>(1);
    const accumulation_t<T>* gamma = args.in<accumulation_t<T>>(2);
    const accumulation_t<T>* rstd = args.in<accumulation_t<T>>(3);
    const T* d_sum = args.in<T>(4);
    T* dx = args.out<T>(0);
    const int64_t n = args.input(0).shape[1];
    const auto differentiate_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * n;
        rms_gradient(dy + first, s + first, rstd[row], gamma, zero_centered,
                     d_sum != nullptr ? d_sum + first : nullptr, dx + first, n);
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), row_grain(n), differentiate_rows);
  }
};

template <class T>
struct RmsNormWeightGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* dy = args.in<T>(0);
    const T* s = args.in<T>(1);
    const A* rstd = args.in<A>(2);
    const int64_t n = args.input(0).shape[1];
    sum_rows(*args.pool, row_pieces(args.input(0).shape[0], n), args.input(0).rows(), n,
             reinterpret_cast<A*>(args.workspace),
             args.attributes->as<RmsNormWeightGradientAttributes>().accumulate, args.out<A>(0),
             [=](int64_t row, A* partial) {
               rms_add_gain_gradient(dy + row * n, s + row * n, rstd[row], partial, n);
             });
  }
};

}  // namespace

CpuKernel rms_norm_cpu_kernel(const OpView& op) {
  return select_float_kernel<RmsNormKernel>(op.output(0).dtype);
}

CpuKernel rms_norm_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<RmsNormGradientKernel>(op.output(0).dtype);
}

CpuKernel rms_norm_weight_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<RmsNormWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
