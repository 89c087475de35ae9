#include <algorithm>

#include "ops/attention/attention_target/attention_target.h"
#include "ops/attention/sparse_attention/gathered_keys.h"
#include "ops/cpu/exponentials.h"
#include "ops/cpu/gemm.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// Keys whose scores are taken at a time.
constexpr int64_t kTargetBlock = 128;

// Of one query: the scores of all heads, [H, n], with n keys.
template <class T>
void score_all(const KernelArguments& args, const SparseAttentionAttributes& a, int64_t query,
               const KeyPositions& positions, accumulation_t<T>* queries, accumulation_t<T>* keys,
               accumulation_t<T>* scores) {
  using A = accumulation_t<T>;
  const KeyRows rows = a.rows();
  const int64_t d = a.key_dim;
  load(args.in<T>(0) + query * a.heads * d, queries, a.heads * d);
  for (int64_t begin = 0; begin < positions.count; begin += kTargetBlock) {
    const int64_t count = std::min(kTargetBlock, positions.count - begin);
    gather_keys(args.in<T>(1), d, rows, query / rows.rows, positions, begin, count, keys);
    gemm_tile<A>(false, true, a.heads, count, d, static_cast<A>(a.scale), queries, d, keys, d, A(0),
                 scores + begin, positions.count);
  }
}

template <class T>
struct AttentionTargetKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<SparseAttentionAttributes>();
    const KeyRows rows = a.rows();
    const int32_t* chosen = args.in<int32_t>(2);
    const int64_t most = args.output(0).shape[1];
    args.pool->parallel_ranges(rows.queries(), 4, [&](int64_t begin, int64_t end, int worker) {
      A* queries = args.thread_scratch<A>(worker);
      A* keys = queries + int64_t{a.heads} * a.key_dim;
      A* scores = keys + kTargetBlock * a.key_dim;
      for (int64_t query = begin; query < end; ++query) {
        const KeyPositions positions = chosen != nullptr
                                           ? chosen_positions(chosen, query, most)
                                           : visible_positions(rows, args.in<int32_t>(3), query);
        const int64_t n = positions.count;
        score_all<T>(args, a, query, positions, queries, keys, scores);
        A* row = args.out<A>(0) + query * most;
        std::fill(row, row + most, A(0));
        A* target = row + positions.first;
        for (int64_t head = 0; head < a.heads; ++head) {
          A* p = scores + head * n;
          scaled_exponentials(p, n, max(p, n), A(1), p);
          axpy(A(1) / sum(p, n), p, target, n);
        }
      }
    });
  }
};

}  // namespace

CpuKernel attention_target_cpu_kernel(const OpView& op) {
  return select_float_kernel<AttentionTargetKernel>(op.input(0).dtype);
}

uint64_t attention_target_scratch_bytes(const OpView& op) {
  const auto& a = op.attributes<SparseAttentionAttributes>();
  const int64_t elements =
      (a.heads + kTargetBlock) * int64_t{a.key_dim} + a.heads * op.output(0).shape[1];
  return static_cast<uint64_t>(elements) * size_of(op.output(0).dtype);
}

}  // namespace troupe
