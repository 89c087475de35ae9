#include "ops/losses/index_loss/index_loss_cpu.h"

#include <algorithm>
#include <cmath>

#include "ops/attention/index_topk/index_scores.h"
#include "ops/cpu/exponentials.h"
#include "ops/losses/index_loss/index_loss.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// The keys of a query and what it should give each of them.
template <class A>
struct IndexTarget {
  KeyPositions positions;
  const A* values;
  A norm;  // what they are divided by
};

template <class A>
IndexTarget<A> index_target(const KernelArguments& args, const KeyRows& rows, int64_t query) {
  const int64_t most = args.input(3).shape[1];
  const int32_t* chosen = args.in<int32_t>(4);
  const KeyPositions positions = chosen != nullptr
                                     ? chosen_positions(chosen, query, most)
                                     : visible_positions(rows, args.in<int32_t>(5), query);
  const A* values = args.in<A>(3) + query * most + positions.first;
  return {positions, values,
          std::max(sum(values, positions.count), static_cast<A>(kIndexLossEpsilon))};
}

// scores[i] -= log sum of their exponentials.
template <class A>
void to_log_probabilities(A* scores, int64_t n) {
  const ExponentialSum<A> all = exponential_sum(scores, n);
  const A log_sum = all.largest + std::log(all.total);
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) scores[i] -= log_sum;
}

template <class T>
struct IndexLossKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<IndexLossAttributes>();
    A* loss = args.out<A>(0);
    *loss = 0;
    if (args.in<A>(3) == nullptr) return;
    const KeyRows rows = a.index.rows();
    A* of_query = reinterpret_cast<A*>(args.workspace);
    args.pool->parallel_ranges(rows.queries(), 4, [&](int64_t begin, int64_t end, int worker) {
      IndexQuery<T> query(a.index, args.thread_scratch<A>(worker));
      A* scores = query.rest;
      for (int64_t row = begin; row < end; ++row) {
        const IndexTarget<A> target = index_target<A>(args, rows, row);
        query.load_query(args.in<T>(0), args.in<A>(2), row);
        query.score(args.in<T>(1), target.positions, scores);
        to_log_probabilities(scores, target.positions.count);
        of_query[row] = lane_sum<A>(target.positions.count, [&](int64_t i) {
          const A wanted = target.values[i] / target.norm;
          return wanted *
                 (std::log(std::max(wanted, static_cast<A>(kIndexLossEpsilon))) - scores[i]);
        });
      }
    });
    *loss = static_cast<A>(a.coefficient) * sum(of_query, rows.queries()) /
            static_cast<A>(rows.queries());
  }
};

template <class T>
struct IndexLossGradientKernel {
  using A = accumulation_t<T>;

  static void run(const KernelArguments& args) {
    const auto& a = args.attributes->as<IndexLossAttributes>();
    const KeyRows rows = a.index.rows();
    if (args.in<A>(3) == nullptr) {
      clear(args.out<T>(0), args.output(0));
      clear(args.out<T>(1), args.output(1));
      clear(args.out<A>(2), args.output(2));
      return;
    }
    const A factor =
        static_cast<A>(a.coefficient) * *args.in<A>(6) / static_cast<A>(rows.queries());
    sum_key_gradients(args, rows, a.index.head_dim, reinterpret_cast<A*>(args.workspace),
                      args.out<T>(1), [&](int64_t row, A* d_keys, int worker) {
                        add_query(args, a.index, rows, row, factor, d_keys,
                                  args.thread_scratch<A>(worker));
                      });
  }

 private:
  template <class Element>
  static void clear(Element* data, const TensorView& view) {
    std::fill(data, data + view.shape.elements(), Element(0.0F));
  }

  static void add_query(const KernelArguments& args, const IndexAttributes& index,
                        const KeyRows& rows, int64_t row, A factor, A* d_keys, A* scratch) {
    const int64_t heads = index.heads;
    const int64_t d = index.head_dim;
    const auto scale = static_cast<A>(index.scale());
    IndexQuery<T> query(index, scratch);
    A* d_query = query.rest;           // [H, d]
    A* d_block = d_query + heads * d;  // of a block of keys
    A* d_scores = d_block + kIndexBlock * d;
    const IndexTarget<A> target = index_target<A>(args, rows, row);
    const int64_t keys = target.positions.count;
    query.load_query(args.in<T>(0), args.in<A>(2), row);
    query.score(args.in<T>(1), target.positions, d_scores);
    to_log_probabilities(d_scores, keys);
    scaled_exponentials(d_scores, keys, A(0), A(1), d_scores);
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < keys; ++i) {
      d_scores[i] = factor * (d_scores[i] - target.values[i] / target.norm);
    }
    A* d_weights = args.out<A>(2) + row * heads;
    std::fill(d_weights, d_weights + heads, A(0));
    for (int64_t begin = 0; begin < keys; begin += kIndexBlock) {
      const int64_t count = std::min(kIndexBlock, keys - begin);
      query.load_block(args.in<T>(1), target.positions, begin, count);
      for (int64_t head = 0; head < heads; ++head) {
        A* dots = query.dots + head * count;
        const A* of_block = d_scores + begin;
        d_weights[head] += scale * lane_sum<A>(count, [=](int64_t i) {
                             return of_block[i] * (dots[i] > A(0) ? dots[i] : A(0));
                           });
        const A weight = scale * query.weights[head];
        TROUPE_INDEPENDENT
        for (int64_t i = 0; i < count; ++i) {
          dots[i] = dots[i] > A(0) ? weight * of_block[i] : A(0);
        }
      }
      gemm_tile<A>(false, false, heads, d, count, A(1), query.dots, count, query.keys, d,
                   begin == 0 ? A(0) : A(1), d_query, d);
      gemm_tile<A>(true, false, count, d, heads, A(1), query.dots, count, query.queries, d, A(0),
                   d_block, d);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t key = rows.key(query.sequence, target.positions[begin + i]);
        add_to(d_block + i * d, d_keys + key * d, d);
      }
    }
    store(d_query, args.out<T>(0) + row * heads * d, heads * d);
  }
};

}  // namespace

CpuKernel index_loss_cpu_kernel(const OpView& op) {
  return select_float_kernel<IndexLossKernel>(op.input(0).dtype);
}

CpuKernel index_loss_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<IndexLossGradientKernel>(op.input(0).dtype);
}

uint64_t index_loss_scratch_bytes(const IndexAttributes& index, int64_t most, DType dtype) {
  return static_cast<uint64_t>(IndexQuery<float>::scratch_elements(index) + most) *
         size_of(accumulation_dtype(dtype));
}

uint64_t index_loss_workspace_bytes(const IndexAttributes& index, DType dtype) {
  return static_cast<uint64_t>(index.rows().queries()) * size_of(accumulation_dtype(dtype));
}

uint64_t index_loss_gradient_scratch_bytes(const IndexAttributes& index, int64_t most,
                                           DType dtype) {
  const int64_t elements = (index.heads + kIndexBlock) * int64_t{index.head_dim};
  return index_loss_scratch_bytes(index, most, dtype) +
         static_cast<uint64_t>(elements) * size_of(accumulation_dtype(dtype));
}

uint64_t index_loss_gradient_workspace_bytes(const IndexAttributes& index, DType dtype) {
  return key_gradient_elements(index.rows(), index.head_dim) * size_of(accumulation_dtype(dtype));
}

}  // namespace troupe
