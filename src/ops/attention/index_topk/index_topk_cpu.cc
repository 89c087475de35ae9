#include <algorithm>
#include <functional>
#include <limits>

#include "ops/attention/index_topk/index_scores.h"
#include "ops/attention/index_topk/index_topk.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// The positions of the `most` largest of more scores than that, ascending; of equal scores the
// first ones. `order`: as many elements as there are scores.
template <class A>
void select_largest(A* scores, const KeyPositions& positions, int64_t most, A* order,
                    int32_t* chosen) {
  const int64_t count = positions.count;
  for (int64_t i = 0; i < count; ++i) {
    if (scores[i] != scores[i]) scores[i] = -std::numeric_limits<A>::infinity();
  }
  std::copy(scores, scores + count, order);
  std::nth_element(order, order + most - 1, order + count, std::greater<A>());
  const A least = order[most - 1];
  const int64_t larger = std::count_if(scores, scores + count, [=](A s) { return s > least; });
  int64_t equal = most - larger;
  for (int64_t i = 0; i < count; ++i) {
    const bool taken = scores[i] > least || (scores[i] == least && equal-- > 0);
    if (taken) *chosen++ = static_cast<int32_t>(positions[i]);
  }
}

template <class T>
struct IndexTopkKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<IndexTopkAttributes>();
    const KeyRows rows = a.index.rows();
    const int64_t most = a.most();
    const int32_t* starts = args.in<int32_t>(3);
    args.pool->parallel_ranges(rows.queries(), 4, [&](int64_t begin, int64_t end, int worker) {
      IndexQuery<T> query(a.index, args.thread_scratch<A>(worker));
      A* scores = query.rest;
      for (int64_t row = begin; row < end; ++row) {
        const KeyPositions visible = visible_positions(rows, starts, row);
        int32_t* chosen = args.out<int32_t>(0) + row * most;
        if (visible.count <= most) {
          for (int64_t i = 0; i < most; ++i) {
            chosen[i] = i < visible.count ? static_cast<int32_t>(visible[i]) : -1;
          }
          continue;
        }
        query.load_query(args.in<T>(0), args.in<A>(2), row);
        query.score(args.in<T>(1), visible, scores);
        select_largest(scores, visible, most, scores + rows.sequence(), chosen);
      }
    });
  }
};

}  // namespace

CpuKernel index_topk_cpu_kernel(const OpView& op) {
  return select_float_kernel<IndexTopkKernel>(op.input(0).dtype);
}

uint64_t index_topk_scratch_bytes(const OpView& op) {
  const IndexAttributes& index = op.attributes<IndexTopkAttributes>().index;
  const int64_t elements = IndexQuery<float>::scratch_elements(index) + 2 * index.rows().sequence();
  return static_cast<uint64_t>(elements) * size_of(accumulation_dtype(op.input(0).dtype));
}

}  // namespace troupe
