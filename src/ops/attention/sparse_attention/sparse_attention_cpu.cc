#include "ops/attention/sparse_attention/sparse_attention_cpu.h"

#include <cmath>

#include "ops/attention/sparse_attention/gathered_keys.h"
#include "ops/cpu/exponentials.h"
#include "ops/cpu/gemm.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// A query's rows and the keys chosen for it, in the type of the sums.
template <class T>
struct SparseQuery {
  using A = accumulation_t<T>;

  SparseQuery(const SparseAttentionAttributes& a, int64_t most, A* scratch)
      : attributes(a),
        rows(a.rows()),
        queries(scratch),
        keys(queries + int64_t{a.heads} * a.key_dim),
        scores(keys + most * a.key_dim),
        rest(scores + a.heads * most) {}

  // Loads query `query`, and its scores.
  void load_query(const T* q, const T* k, const int32_t* chosen, int64_t most, int64_t query) {
    const int64_t d = attributes.key_dim;
    const KeyPositions positions = chosen_positions(chosen, query, most);
    count = positions.count;
    load(q + query * attributes.heads * d, queries, attributes.heads * d);
    gather_keys(k, d, rows, query / rows.rows, positions, 0, count, keys);
    gemm_tile<A>(false, true, attributes.heads, count, d, static_cast<A>(attributes.scale), queries,
                 d, keys, d, A(0), scores, count);
  }

  const SparseAttentionAttributes& attributes;
  const KeyRows rows;
  A* const queries;  // [H, d]
  A* const keys;     // [count, d]
  A* const scores;   // [H, count]
  A* const rest;     // of the scratch memory
  int64_t count = 0;
};

int64_t sparse_query_elements(const SparseAttentionAttributes& a, int64_t most) {
  return (int64_t{a.heads} + most) * a.key_dim + a.heads * most;
}

template <class T>
struct SparseAttentionKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<SparseAttentionAttributes>();
    const int64_t most = args.input(2).shape[1];
    const int64_t e = a.value_dim;
    args.pool->parallel_ranges(a.rows().queries(), 4, [&](int64_t begin, int64_t end, int worker) {
      SparseQuery<T> query(a, most, args.thread_scratch<A>(worker));
      for (int64_t row = begin; row < end; ++row) {
        query.load_query(args.in<T>(0), args.in<T>(1), args.in<int32_t>(2), most, row);
        const int64_t n = query.count;
        for (int64_t head = 0; head < a.heads; ++head) {
          A* p = query.scores + head * n;
          const A largest = max(p, n);
          scaled_exponentials(p, n, largest, A(1), p);
          const A total = sum(p, n);
          args.out<A>(1)[row * a.heads + head] = largest + std::log(total);
          for (int64_t i = 0; i < n; ++i) p[i] /= total;
        }
        gemm_tile<A>(false, false, a.heads, e, n, A(1), query.scores, n, query.keys, a.key_dim,
                     A(0), query.rest, e);
        store(query.rest, args.out<T>(0) + row * a.heads * e, a.heads * e);
      }
    });
  }
};

template <class T>
struct SparseAttentionGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<SparseAttentionAttributes>();
    const int64_t most = args.input(3).shape[1];
    const int64_t heads = a.heads;
    const int64_t d = a.key_dim;
    const int64_t e = a.value_dim;
    const auto scale = static_cast<A>(a.scale);
    const auto add = [&](int64_t row, A* d_keys, int worker) {
      SparseQuery<T> query(a, most, args.thread_scratch<A>(worker));
      query.load_query(args.in<T>(1), args.in<T>(2), args.in<int32_t>(3), most, row);
      const int64_t n = query.count;
      A* d_out = query.rest;           // [H, e]
      A* ds = d_out + heads * e;       // [H, n]
      A* d_query = ds + heads * most;  // [H, d]
      A* d_key = d_query + heads * d;  // [n, d]
      load(args.in<T>(0) + row * heads * e, d_out, heads * e);
      gemm_tile<A>(false, true, heads, n, e, A(1), d_out, e, query.keys, d, A(0), ds, n);
      const T* out = args.in<T>(4) + row * heads * e;
      const A* lse = args.in<A>(5) + row * heads;
      for (int64_t head = 0; head < heads; ++head) {
        A* p = query.scores + head * n;
        A* ds_row = ds + head * n;
        const A out_dot = dot(out + head * e, d_out + head * e, e);
        scaled_exponentials(p, n, lse[head], A(1), p);
        TROUPE_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) ds_row[i] = p[i] * (ds_row[i] - out_dot);
      }
      gemm_tile<A>(false, false, heads, d, n, scale, ds, n, query.keys, d, A(0), d_query, d);
      store(d_query, args.out<T>(0) + row * heads * d, heads * d);
      gemm_tile<A>(true, false, n, d, heads, scale, ds, n, query.queries, d, A(0), d_key, d);
      gemm_tile<A>(true, false, n, e, heads, A(1), query.scores, n, d_out, e, A(1), d_key, d);
      const KeyPositions positions = chosen_positions(args.in<int32_t>(3), row, most);
      for (int64_t i = 0; i < n; ++i) {
        add_to(d_key + i * d, d_keys + query.rows.key(row / query.rows.rows, positions[i]) * d, d);
      }
    };
    sum_key_gradients(args, a.rows(), d, reinterpret_cast<A*>(args.workspace), args.out<T>(1), add);
  }
};

}  // namespace

CpuKernel sparse_attention_cpu_kernel(const OpView& op) {
  return select_float_kernel<SparseAttentionKernel>(op.input(0).dtype);
}

CpuKernel sparse_attention_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<SparseAttentionGradientKernel>(op.input(0).dtype);
}

uint64_t sparse_attention_scratch_bytes(const SparseAttentionAttributes& attributes, int64_t most,
                                        DType dtype) {
  const int64_t elements =
      sparse_query_elements(attributes, most) + int64_t{attributes.heads} * attributes.value_dim;
  return static_cast<uint64_t>(elements) * size_of(accumulation_dtype(dtype));
}

uint64_t sparse_attention_gradient_scratch_bytes(const SparseAttentionAttributes& attributes,
                                                 int64_t most, DType dtype) {
  const int64_t elements =
      (int64_t{attributes.heads} + most) * attributes.key_dim + attributes.heads * most;
  return sparse_attention_scratch_bytes(attributes, most, dtype) +
         static_cast<uint64_t>(elements) * size_of(accumulation_dtype(dtype));
}

uint64_t sparse_attention_gradient_workspace_bytes(const SparseAttentionAttributes& attributes,
                                                   DType dtype) {
  return key_gradient_elements(attributes.rows(), attributes.key_dim) *
         size_of(accumulation_dtype(dtype));
}

}  // namespace troupe
