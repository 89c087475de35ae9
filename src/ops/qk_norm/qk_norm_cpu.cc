#include <algorithm>

#include "ops/cpu/row_sums.h"
#include "ops/cpu/vector.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/rms_norm/rms_row.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// The vectors of a row that are normalised: those of the queries, then those of the keys.
struct QkNormVectors {
  template <class Heads>
  explicit QkNormVectors(const Heads& attributes)
      : per_head(attributes.scope == QkNormScope::head),
        count(per_head ? attributes.heads + attributes.groups : 2),
        queries(per_head ? attributes.heads : 1),
        head_dim(attributes.head_dim),
        query_elements(attributes.heads * head_dim),
        elements(query_elements + attributes.groups * head_dim) {}

  bool per_head;
  int64_t count, queries, head_dim;
  int64_t query_elements, elements;  // of all queries; of all queries and keys

  bool is_query(int64_t vector) const { return vector < queries; }
  int64_t offset(int64_t vector) const {
    return per_head ? vector * head_dim : vector * query_elements;
  }
  int64_t size(int64_t vector) const {
    if (per_head) return head_dim;
    return is_query(vector) ? query_elements : elements - query_elements;
  }
};

template <class T>
struct QkNormKernel {
  static void run(const KernelArguments& args) {
    const auto attributes = args.attributes->as<QkNormAttributes>();
    const T* qkv = args.in<T>(0);
    const accumulation_t<T>* gamma_q = args.in<accumulation_t<T>>(1);
    const accumulation_t<T>* gamma_k = args.in<accumulation_t<T>>(2);
    const accumulation_t<T>* squares = args.in<accumulation_t<T>>(3);
    T* y = args.out<T>(0);
    accumulation_t<T>* rstd = args.out<accumulation_t<T>>(1);
    const QkNormVectors vectors(attributes);
    const int64_t width = args.input(0).shape[1];
    const auto normalize_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = qkv + row * width;
        T* out = y + row * width;
        for (int64_t i = 0; i < vectors.count; ++i) {
          const int64_t at = vectors.offset(i);
          const auto element = [=](int64_t j) { return widen(in[at + j]); };
          const auto scale =
              squares == nullptr
                  ? rms_reciprocal<accumulation_t<T>>(element, vectors.size(i), attributes.epsilon)
                  : rms_reciprocal_of(squares[row * vectors.count + i],
                                      vectors.size(i) * attributes.ranks, attributes.epsilon);
          rstd[row * vectors.count + i] = scale;
          rms_scale(element, scale, vectors.is_query(i) ? gamma_q : gamma_k,
                    attributes.zero_centered, out + at, vectors.size(i));
        }
        std::copy(in + vectors.elements, in + width, out + vectors.elements);
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), row_grain(width), normalize_rows);
  }
};

template <class T>
struct QkNormGradientKernel {
  static void run(const KernelArguments& args) {
    const auto attributes = args.attributes->as<QkNormAttributes>();
    const T* dy = args.in<T>(0);
    const T* qkv = args.in<T>(1);
    const accumulation_t<T>* gamma_q = args.in<accumulation_t<T>>(2);
    const accumulation_t<T>* gamma_k = args.in<accumulation_t<T>>(3);
    const accumulation_t<T>* rstd = args.in<accumulation_t<T>>(4);
    T* d_qkv = args.out<T>(0);
    const bool has_squares = args.input(5).data != nullptr;
    accumulation_t<T>* d_squares = has_squares ? args.out<accumulation_t<T>>(1) : nullptr;
    const QkNormVectors vectors(attributes);
    const int64_t width = args.input(0).shape[1];
    const auto differentiate_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row * width;
        for (int64_t i = 0; i < vectors.count; ++i) {
          const int64_t at = first + vectors.offset(i);
          if (has_squares) {
            d_squares[row * vectors.count + i] = rms_gradient_of_squares(
                dy + at, qkv + at, rstd[row * vectors.count + i],
                vectors.is_query(i) ? gamma_q : gamma_k, attributes.zero_centered, d_qkv + at,
                vectors.size(i), attributes.ranks);
            continue;
          }
          rms_gradient(dy + at, qkv + at, rstd[row * vectors.count + i],
                       vectors.is_query(i) ? gamma_q : gamma_k, attributes.zero_centered,
                       static_cast<const T*>(nullptr), d_qkv + at, vectors.size(i));
        }
        std::copy(dy + first + vectors.elements, dy + first + width,
                  d_qkv + first + vectors.elements);
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), row_grain(width), differentiate_rows);
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
    const QkNormVectors vectors(attributes);
    const bool queries = attributes.first_head == 0;
    const int64_t first = queries ? 0 : vectors.queries;
    const int64_t end = queries ? vectors.queries : vectors.count;
    const int64_t n = vectors.size(first);
    const int64_t width = args.input(0).shape[1];
    sum_rows(
        *args.pool, row_pieces(args.input(0).shape[0], attributes.head_count * vectors.head_dim),
        args.input(0).rows(), n, reinterpret_cast<A*>(args.workspace), attributes.accumulate,
        args.out<A>(0), [=](int64_t row, A* partial) {
          for (int64_t i = first; i < end; ++i) {
            const int64_t at = row * width + vectors.offset(i);
            rms_add_gain_gradient(dy + at, qkv + at, rstd[row * vectors.count + i], partial, n);
          }
        });
  }
};

template <class T>
struct QkSquaresKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* qkv = args.in<T>(0);
    A* squares = args.out<A>(0);
    const QkNormVectors vectors(args.attributes->as<QkNormAttributes>());
    const int64_t width = args.input(0).shape[1];
    const auto sum_rows_of = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t i = 0; i < vectors.count; ++i) {
          squares[row * vectors.count + i] =
              sum_of_squares(qkv + row * width + vectors.offset(i), vectors.size(i));
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), row_grain(width), sum_rows_of);
  }
};

template <class T>
struct QkSquaresGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const A* d_squares = args.in<A>(0);
    const T* qkv = args.in<T>(1);
    T* d_qkv = args.out<T>(0);
    const QkNormVectors vectors(args.attributes->as<QkNormAttributes>());
    const int64_t width = args.input(1).shape[1];
    const auto scale_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t i = 0; i < vectors.count; ++i) {
          const A factor = 2 * d_squares[row * vectors.count + i];
          const T* x = qkv + row * width + vectors.offset(i);
          T* dx = d_qkv + row * width + vectors.offset(i);
          const int64_t n = vectors.size(i);
          TROUPE_INDEPENDENT
          for (int64_t j = 0; j < n; ++j) dx[j] = T(factor * widen(x[j]));
        }
        std::fill(d_qkv + row * width + vectors.elements, d_qkv + (row + 1) * width, T(0.0F));
      }
    };
    args.pool->parallel_ranges(args.input(1).rows(), row_grain(width), scale_rows);
  }
};

}  // namespace

CpuKernel qk_squares_cpu_kernel(const OpView& op) {
  return select_float_kernel<QkSquaresKernel>(op.input(0).dtype);
}

CpuKernel qk_squares_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<QkSquaresGradientKernel>(op.output(0).dtype);
}

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
