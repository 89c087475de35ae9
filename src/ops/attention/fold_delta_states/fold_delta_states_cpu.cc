#include <algorithm>
#include <utility>

#include "ops/attention/fold_delta_states/delta_ends.h"
#include "ops/attention/fold_delta_states/fold_delta_states.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// after = P before + Q, with `end` Q beside P.
template <class A>
void advance_state(const DeltaEndsShape& shape, const A* end, const A* before, A* after) {
  const int64_t n = shape.value_dim;
  for (int64_t i = 0; i < shape.key_dim; ++i) {
    const A* row = end + i * shape.columns();
    std::copy_n(row, n, after + i * n);
    for (int64_t k = 0; k < shape.key_dim; ++k) axpy(row[n + k], before + k * n, after + i * n, n);
  }
}

template <class A>
struct FoldDeltaStatesKernel {
  static void run(const KernelArguments& args) {
    const DeltaEndsShape shape(args.attributes->as<FoldDeltaStatesAttributes>().chunks,
                               args.input(0).shape);
    args.pool->parallel_for(shape.sequences * shape.heads, [&](int64_t work, int worker) {
      const int64_t sequence = work / shape.heads;
      const int64_t head = work % shape.heads;
      A* state = args.thread_scratch<A>(worker);
      A* after = state + shape.state_size();
      std::fill_n(state, shape.state_size(), A(0));
      for (int64_t chunk = 0; chunk <= shape.last(); ++chunk) {
        const int64_t own = shape.state_of(sequence, head, chunk);
        if (own >= 0) std::copy_n(state, shape.state_size(), args.out<A>(0) + own);
        if (chunk == shape.last()) break;
        advance_state(shape, args.in<A>(0) + shape.end_of(sequence, head, chunk), state, after);
        std::swap(state, after);
      }
    });
  }
};

template <class A>
struct FoldDeltaStatesGradientKernel {
  static void run(const KernelArguments& args) {
    const DeltaEndsShape shape(args.attributes->as<FoldDeltaStatesAttributes>().chunks,
                               args.input(1).shape);
    args.pool->parallel_for(shape.sequences * shape.heads, [&](int64_t work, int worker) {
      run_head(args, shape, work / shape.heads, work % shape.heads, args.thread_scratch<A>(worker));
    });
  }

  static void run_head(const KernelArguments& args, const DeltaEndsShape& shape, int64_t sequence,
                       int64_t head, A* scratch) {
    const int64_t n = shape.value_dim;
    const int64_t size = shape.state_size();
    const A* d_states = args.in<A>(0);
    const A* ends = args.in<A>(1);
    A* d_ends = args.out<A>(0);
    A* states = scratch;  // S before each chunk
    std::fill_n(states, size, A(0));
    for (int64_t chunk = 0; chunk + 1 < shape.last(); ++chunk) {
      advance_state(shape, ends + shape.end_of(sequence, head, chunk), states + chunk * size,
                    states + (chunk + 1) * size);
    }
    for (int64_t chunk = shape.last(); chunk < shape.count(); ++chunk) {
      std::fill_n(d_ends + shape.end_of(sequence, head, chunk), shape.key_dim * shape.columns(),
                  A(0));
    }
    A* d_after = states + shape.count() * size;
    A* d_before = d_after + size;
    std::copy_n(d_states + shape.state_of(sequence, head, shape.last()), size, d_after);
    for (int64_t chunk = shape.last() - 1; chunk >= 0; --chunk) {
      const int64_t at = shape.end_of(sequence, head, chunk);
      const int64_t own = shape.state_of(sequence, head, chunk);
      if (own >= 0) {
        std::copy_n(d_states + own, size, d_before);
      } else {
        std::fill_n(d_before, size, A(0));
      }
      for (int64_t i = 0; i < shape.key_dim; ++i) {
        const A* d_row = d_after + i * n;
        A* d_end = d_ends + at + i * shape.columns();
        std::copy_n(d_row, n, d_end);
        for (int64_t k = 0; k < shape.key_dim; ++k) {
          d_end[n + k] = dot(d_row, states + chunk * size + k * n, n);
          axpy(ends[at + i * shape.columns() + n + k], d_row, d_before + k * n, n);
        }
      }
      std::swap(d_after, d_before);
    }
  }
};

}  // namespace

CpuKernel fold_delta_states_cpu_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &FoldDeltaStatesKernel<double>::run
                                         : &FoldDeltaStatesKernel<float>::run;
}

CpuKernel fold_delta_states_gradient_cpu_kernel(const OpView& op) {
  return op.input(1).dtype == DType::f64 ? &FoldDeltaStatesGradientKernel<double>::run
                                         : &FoldDeltaStatesGradientKernel<float>::run;
}

}  // namespace troupe
