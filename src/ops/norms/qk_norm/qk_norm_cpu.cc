#include <algorithm>

#include "ops/cpu/row_sums.h"
#include "ops/cpu/vector.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/norms/rms_norm/rms_row.h"
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

// How the heads of one row turn: elements i and i + pairs by angle i, from 2 pairs on none.
template <class A>
struct QkRotation {
  template <class Heads>
  QkRotation(const A* table, int64_t row, const Heads& attributes)
      : angles(table + row % attributes.sequence * attributes.rotary_dim),
        pairs(attributes.rotary_dim / 2),
        head_dim(attributes.head_dim) {}

  const A* angles;  // cosine and sine of each pair
  int64_t pairs;
  int64_t head_dim;
};

// One head, normalised and turned; y may be x.
template <class T>
void normalize_and_turn(const T* x, accumulation_t<T> rstd, const accumulation_t<T>* gamma,
                        accumulation_t<T> offset, const QkRotation<accumulation_t<T>>& rotation,
                        T* y) {
  using A = accumulation_t<T>;
  const int64_t pairs = rotation.pairs;
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < pairs; ++i) {
    const A cosine = rotation.angles[2 * i];
    const A sine = rotation.angles[2 * i + 1];
    const A first = widen(x[i]) * rstd * (offset + gamma[i]);
    const A second = widen(x[i + pairs]) * rstd * (offset + gamma[i + pairs]);
    y[i] = T(first * cosine - second * sine);
    y[i + pairs] = T(second * cosine + first * sine);
  }
  TROUPE_INDEPENDENT
  for (int64_t i = 2 * pairs; i < rotation.head_dim; ++i) {
    y[i] = T(widen(x[i]) * rstd * (offset + gamma[i]));
  }
}

// The gradient of one head before it turned: take(i, value) for every element, in pairs.
template <class T, class Take>
[[gnu::always_inline]] inline void turn_back(const T* dy,
                                             const QkRotation<accumulation_t<T>>& rotation,
                                             const Take& take) {
  using A = accumulation_t<T>;
  const int64_t pairs = rotation.pairs;
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < pairs; ++i) {
    const A cosine = rotation.angles[2 * i];
    const A sine = rotation.angles[2 * i + 1];
    const A first = widen(dy[i]);
    const A second = widen(dy[i + pairs]);
    take(i, first * cosine + second * sine);
    take(i + pairs, second * cosine - first * sine);
  }
  TROUPE_INDEPENDENT
  for (int64_t i = 2 * pairs; i < rotation.head_dim; ++i) take(i, widen(dy[i]));
}

template <class T>
struct QkNormRopeKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<QkNormAttributes>();
    const T* qkv = args.in<T>(0);
    const A* gamma_q = args.in<A>(1);
    const A* gamma_k = args.in<A>(2);
    const A* table = args.in<A>(3);
    const A* squares = args.in<A>(4);
    T* y = args.out<T>(0);
    A* rstd = args.out<A>(1);
    const A offset = attributes.zero_centered ? A(1) : A(0);
    const QkNormVectors vectors(attributes);
    const int64_t width = args.input(0).shape[1];
    const auto normalize_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = qkv + row * width;
        T* out = y + row * width;
        const QkRotation<A> rotation(table, row, attributes);
        for (int64_t i = 0; i < vectors.count; ++i) {
          const int64_t at = vectors.offset(i);
          const int64_t n = vectors.size(i);
          const auto element = [=](int64_t j) { return widen(in[at + j]); };
          const A scale = squares == nullptr
                              ? rms_reciprocal<A>(element, n, attributes.epsilon)
                              : rms_reciprocal_of(squares[row * vectors.count + i],
                                                  n * attributes.ranks, attributes.epsilon);
          rstd[row * vectors.count + i] = scale;
          const A* gamma = vectors.is_query(i) ? gamma_q : gamma_k;
          for (int64_t j = 0; j < n; j += vectors.head_dim) {
            normalize_and_turn(in + at + j, scale, gamma + j, offset, rotation, out + at + j);
          }
        }
        if (out != in) std::copy(in + vectors.elements, in + width, out + vectors.elements);
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), row_grain(width), normalize_rows);
  }
};

template <class T>
struct QkNormRopeGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<QkNormAttributes>();
    const T* dy = args.in<T>(0);
    const T* qkv = args.in<T>(1);
    const A* gamma_q = args.in<A>(2);
    const A* gamma_k = args.in<A>(3);
    const A* table = args.in<A>(4);
    const A* rstd = args.in<A>(5);
    T* d_qkv = args.out<T>(0);
    A* d_squares = args.input(6).data != nullptr ? args.out<A>(1) : nullptr;
    const A offset = attributes.zero_centered ? A(1) : A(0);
    const QkNormVectors vectors(attributes);
    const int64_t width = args.input(0).shape[1];
    const auto differentiate_rows = [=, &args](int64_t begin, int64_t end, int worker) {
      A* arrived = args.thread_scratch<A>(worker);  // at x rstd
      for (int64_t row = begin; row < end; ++row) {
        const T* in = dy + row * width;
        T* out = d_qkv + row * width;
        const QkRotation<A> rotation(table, row, attributes);
        for (int64_t i = 0; i < vectors.count; ++i) {
          const int64_t at = vectors.offset(i);
          const int64_t n = vectors.size(i);
          const T* x = qkv + row * width + at;
          const A* gamma = vectors.is_query(i) ? gamma_q : gamma_k;
          for (int64_t j = 0; j < n; j += vectors.head_dim) {
            turn_back(in + at + j, rotation, [=](int64_t k, A value) {
              arrived[j + k] = value * (offset + gamma[j + k]);
            });
          }
          const A scale = rstd[row * vectors.count + i];
          const A projection = lane_sum<A>(n, [=](int64_t j) { return arrived[j] * widen(x[j]); });
          A along = scale * scale * scale * projection / static_cast<A>(n);
          if (d_squares != nullptr) {
            d_squares[row * vectors.count + i] = -along / static_cast<A>(2 * attributes.ranks);
            along = 0;
          }
          TROUPE_INDEPENDENT
          for (int64_t j = 0; j < n; ++j) {
            out[at + j] = T(scale * arrived[j] - along * widen(x[j]));
          }
        }
        if (out != in) std::copy(in + vectors.elements, in + width, out + vectors.elements);
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), row_grain(width), differentiate_rows);
  }
};

template <class T>
struct QkNormRopeWeightGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<QkNormWeightGradientAttributes>();
    const T* dy = args.in<T>(0);
    const T* qkv = args.in<T>(1);
    const A* table = args.in<A>(2);
    const A* rstd = args.in<A>(3);
    const QkNormVectors vectors(attributes);
    const bool queries = attributes.first_head == 0;
    const int64_t first = queries ? 0 : vectors.queries;
    const int64_t end = queries ? vectors.queries : vectors.count;
    const int64_t n = vectors.size(first);
    const int64_t width = args.input(0).shape[1];
    sum_rows(*args.pool,
             row_pieces(args.input(0).shape[0], attributes.head_count * vectors.head_dim),
             args.input(0).rows(), n, reinterpret_cast<A*>(args.workspace), attributes.accumulate,
             args.out<A>(0), [=](int64_t row, A* partial) {
               const QkRotation<A> rotation(table, row, attributes);
               for (int64_t i = first; i < end; ++i) {
                 const A scale = rstd[row * vectors.count + i];
                 for (int64_t j = 0; j < n; j += vectors.head_dim) {
                   const int64_t at = row * width + vectors.offset(i) + j;
                   const T* x = qkv + at;
                   A* sums = partial + j;
                   turn_back(dy + at, rotation,
                             [=](int64_t k, A value) { sums[k] += value * widen(x[k]) * scale; });
                 }
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

CpuKernel qk_norm_rope_cpu_kernel(const OpView& op) {
  return select_float_kernel<QkNormRopeKernel>(op.output(0).dtype);
}

CpuKernel qk_norm_rope_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<QkNormRopeGradientKernel>(op.output(0).dtype);
}

CpuKernel qk_norm_rope_weight_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<QkNormRopeWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
