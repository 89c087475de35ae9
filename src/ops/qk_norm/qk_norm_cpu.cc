#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/rms_norm/rms_row.h"
#include "program/kernel.h"

namespace troupe {
namespace {

int64_t qk_norm_row_grain(int64_t width) {
  return std::max<int64_t>(1, 32768 / width);
}

template <class T>
struct QkNormKernel {
  static void run(const KernelArguments& args) {
    const auto attributes = args.attributes->as<QkNormAttributes>();
    const T* qkv = args.in<T>(0);
    const T* gamma_q = args.in<T>(1);
    const T* gamma_k = args.in<T>(2);
    T* y = args.out<T>(0);
    accumulation_t<T>* rstd = args.out<accumulation_t<T>>(1);
    const int64_t d = attributes.head_dim;
    const int64_t width = args.input(0).shape[1];
    const int64_t normalized = attributes.heads + attributes.groups;
    const auto normalize_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = qkv + row * width;
        T* out = y + row * width;
        for (int64_t head = 0; head < normalized; ++head) {
          const accumulation_t<T> scale = rms_reciprocal(in + head * d, d, attributes.epsilon);
          rstd[row * normalized + head] = scale;
          rms_scale(in + head * d, scale, head < attributes.heads ? gamma_q : gamma_k,
                    /*zero_centered=*/false, out + head * d, d);
        }
        std::copy(in + normalized * d, in + width, out + normalized * d);
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), qk_norm_row_grain(width), normalize_rows);
  }
};

template <class T>
struct QkNormGradientKernel {
  static void run(const KernelArguments& args) {
    const auto attributes = args.attributes->as<QkNormAttributes>();
    const T* dy = args.in<T>(0);
    const T* qkv = args.in<T>(1);
    const T* gamma_q = args.in<T>(2);
    const T* gamma_k = args.in<T>(3);
    const accumulation_t<T>* rstd = args.in<accumulation_t<T>>(4);
    T* d_qkv = args.out<T>(0);
    const int64_t d = attributes.head_dim;
    const int64_t width = args.input(0).shape[1];
    const int64_t normalized = attributes.heads + attributes.groups;
    const auto differentiate_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * width;
        for (int64_t head = 0; head < normalized; ++head) {
          const int64_t at = first + head * d;
          rms_gradient(dy + at, qkv + at, rstd[row * normalized + head],
                       head < attributes.heads ? gamma_q : gamma_k, /*zero_centered=*/false,
                       static_cast<const T*>(nullptr), d_qkv + at, d);
        }
        std::copy(dy + first + normalized * d, dy + first + width, d_qkv + first + normalized * d);
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), qk_norm_row_grain(width), differentiate_rows);
  }
};

template <class T>
struct QkNormWeightGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<QkNormWeightGradientAttributes>();
    const T* dy = args.in<T>(0);
    const T* qkv = args.in<T>(1);
    const A* rstd = args.in<A>(2);
    const int64_t d = attributes.head_dim;
    const int64_t width = args.input(0).shape[1];
    const int64_t normalized = attributes.heads + attributes.groups;
    const int64_t first_head = attributes.first_head;
    const int64_t end_head = first_head + attributes.head_count;
    rms_sum_rows(*args.pool, rms_pieces(args.input(0).shape[0], attributes.head_count * d),
                 args.input(0).rows(), d, reinterpret_cast<A*>(args.workspace),
                 attributes.accumulate, args.out<A>(0), [=](int64_t row, A* partial) {
                   for (int64_t head = first_head; head < end_head; ++head) {
                     const int64_t at = row * width + head * d;
                     rms_add_gain_gradient(dy + at, qkv + at, rstd[row * normalized + head],
                                           partial, d);
                   }
                 });
  }
};

}  // namespace

CpuKernel qk_norm_cpu_kernel(const OpView& op) {
  return select_float_kernel<QkNormKernel>(op.output(0).dtype);
}

CpuKernel qk_norm_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<QkNormGradientKernel>(op.output(0).dtype);
}

CpuKernel qk_norm_weight_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<QkNormWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
