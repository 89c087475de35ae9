#include "ops/attention/index_topk/index_scores.cuh"
#include "ops/losses/index_loss/index_loss.h"

namespace troupe {
namespace {

constexpr int kIndexLossThreads = 256;
constexpr int kIndexGradientThreads = 128;
constexpr int kIndexChunk = 128;  // keys, or heads, at a time

// The keys of a query and what it should give each of them.
template <class T>
struct TargetCall {
  using A = accumulation_t<T>;
  const A* target;
  const int32_t* chosen;
  const int32_t* starts;
  int64_t most;

  explicit TargetCall(const CudaKernelArguments& args)
      : target(args.in<A>(3)),
        chosen(args.in<int32_t>(4)),
        starts(args.in<int32_t>(5)),
        most(args.input(3).shape[1]) {}

  __device__ KeyPositions positions(const KeyRows& rows, int64_t query) const {
    return chosen != nullptr ? chosen_positions(chosen, query, most)
                             : visible_positions(rows, starts, query);
  }
  // Of the first of these positions.
  __device__ int64_t element(int64_t query, const KeyPositions& positions) const {
    return query * most + positions.first;
  }
};

// Of a query's scores: what is taken from each for the logarithm of its probability.
template <class A>
__device__ A log_sum_of(const A* scores, int64_t count, A* shared) {
  A largest = -infinity<A>();
  for_row(count, [&](int64_t i) { largest = scores[i] > largest ? scores[i] : largest; });
  largest = block_max(largest, shared);
  A total = 0;
  for_row(count, [&](int64_t i) { total += exp(scores[i] - largest); });
  return largest + log(block_sum(total, shared));
}

template <class A>
__device__ A target_norm(const A* target, int64_t count, A* shared) {
  A sum = 0;
  for_row(count, [&](int64_t i) { sum += target[i]; });
  sum = block_sum(sum, shared);
  return sum > A(kIndexLossEpsilon) ? sum : A(kIndexLossEpsilon);
}

// Each block takes one query after the other; `memory` has a row of scores for each block.
template <class T, int kStep>
__global__ void __launch_bounds__(kIndexLossThreads)
    index_loss_kernel(IndexCall<T> call, TargetCall<T> targets, accumulation_t<T>* of_query,
                      accumulation_t<T>* memory) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  A* scores = memory + blockIdx.x * targets.most;
  for (int64_t query = blockIdx.x; query < call.rows.queries(); query += gridDim.x) {
    const KeyPositions positions = targets.positions(call.rows, query);
    const A* target = targets.target + targets.element(query, positions);
    __syncthreads();
    score_positions<kStep>(call, query, positions, scores);
    __syncthreads();
    const A log_sum = log_sum_of(scores, positions.count, shared);
    const A norm = target_norm(target, positions.count, shared);
    A loss = 0;
    for_row(positions.count, [&](int64_t i) {
      const A wanted = target[i] / norm;
      const A least = wanted > A(kIndexLossEpsilon) ? wanted : A(kIndexLossEpsilon);
      loss += wanted * (log(least) - (scores[i] - log_sum));
    });
    loss = block_sum(loss, shared);
    if (threadIdx.x == 0) of_query[query] = loss;
  }
}

template <class A>
__global__ void __launch_bounds__(kIndexLossThreads)
    index_loss_sum_kernel(const A* of_query, int64_t queries, A factor, A* loss) {
  __shared__ A shared[32];
  A sum = 0;
  for_row(queries, [&](int64_t i) { sum += of_query[i]; });
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *loss = factor * sum;
}

// The gradients of all scores, where `targets` has the targets. A block for each query.
template <class T, int kStep>
__global__ void __launch_bounds__(kIndexLossThreads)
    index_score_gradient_kernel(IndexCall<T> call, TargetCall<T> targets,
                                const accumulation_t<T>* d_loss, accumulation_t<T> factor,
                                accumulation_t<T>* d_scores) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t query = blockIdx.x;
  const KeyPositions positions = targets.positions(call.rows, query);
  const int64_t element = targets.element(query, positions);
  const A* target = targets.target + element;
  A* scores = d_scores + element;
  score_positions<kStep>(call, query, positions, scores);
  __syncthreads();
  const A log_sum = log_sum_of(scores, positions.count, shared);
  const A norm = target_norm(target, positions.count, shared);
  const A scaled = factor * *d_loss;
  for_row(positions.count,
          [&](int64_t i) { scores[i] = scaled * (exp(scores[i] - log_sum) - target[i] / norm); });
}

// d_q and d_w. A block for each head of each query. Shared memory: d sums.
template <class T, int kStep>
__global__ void __launch_bounds__(kIndexGradientThreads)
    index_query_gradient_kernel(IndexCall<T> call, TargetCall<T> targets,
                                const accumulation_t<T>* d_scores, T* d_q, accumulation_t<T>* d_w) {
  using A = accumulation_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* sums = reinterpret_cast<A*>(memory);
  __shared__ A d_dots[kIndexChunk];
  __shared__ A shared[32];
  const int64_t query = blockIdx.y;
  const int head = static_cast<int>(blockIdx.x);
  const int64_t row = query * call.heads + head;
  const KeyPositions positions = targets.positions(call.rows, query);
  const A* of_query = d_scores + targets.element(query, positions);
  const A weight = call.scale * call.w[row];
  for_row(call.head_dim, [&](int64_t e) { sums[e] = 0; });
  A d_weight = 0;
  for (int64_t begin = 0; begin < positions.count; begin += kIndexChunk) {
    const int n = static_cast<int>(min(int64_t{kIndexChunk}, positions.count - begin));
    __syncthreads();
    for_row(n, [&](int64_t i) {
      const A product =
          call.template dot<kStep>(query, head, call.key(query, positions[begin + i]));
      const A d_score = of_query[begin + i];
      d_dots[i] = product > A(0) ? weight * d_score : A(0);
      if (product > A(0)) d_weight += d_score * product;
    });
    __syncthreads();
    for_row(call.head_dim, [&](int64_t e) {
      A sum = sums[e];
      for (int i = 0; i < n; ++i) {
        sum += d_dots[i] * widen(call.key(query, positions[begin + i])[e]);
      }
      sums[e] = sum;
    });
  }
  d_weight = call.scale * block_sum(d_weight, shared);
  if (threadIdx.x == 0) d_w[row] = d_weight;
  for_row(call.head_dim, [&](int64_t e) { d_q[row * call.head_dim + e] = round_to<T>(sums[e]); });
}

// d_k. A block for each key, which goes through the queries of its sequence in order. Shared
// memory: d sums.
template <class T, int kStep>
__global__ void __launch_bounds__(kIndexGradientThreads)
    index_key_gradient_kernel(IndexCall<T> call, TargetCall<T> targets,
                              const accumulation_t<T>* d_scores, T* d_k) {
  using A = accumulation_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* sums = reinterpret_cast<A*>(memory);
  __shared__ A d_dots[kIndexChunk];
  const int64_t row = blockIdx.x;
  const int64_t position = call.rows.key_position(row);
  const int64_t first = call.rows.key_sequence(row) * call.rows.rows;
  const T* key = call.k + row * call.head_dim;
  for_row(call.head_dim, [&](int64_t e) { sums[e] = 0; });
  for (int64_t query = first; query < first + call.rows.rows; ++query) {
    if (call.rows.position(query) < position) continue;
    const KeyPositions positions = targets.positions(call.rows, query);
    const int64_t number = number_of(positions, position);
    if (number < 0) continue;
    const A d_score = d_scores[targets.element(query, positions) + number];
    for (int begin = 0; begin < call.heads; begin += kIndexChunk) {
      const int n = min(kIndexChunk, call.heads - begin);
      __syncthreads();
      for_row(n, [&](int64_t i) {
        const int head = begin + static_cast<int>(i);
        const A product = call.template dot<kStep>(query, head, key);
        d_dots[i] =
            product > A(0) ? call.scale * call.w[query * call.heads + head] * d_score : A(0);
      });
      __syncthreads();
      for_row(call.head_dim, [&](int64_t e) {
        A sum = sums[e];
        for (int i = 0; i < n; ++i) {
          sum += d_dots[i] * widen(call.q[(query * call.heads + begin + i) * call.head_dim + e]);
        }
        sums[e] = sum;
      });
    }
  }
  for_row(call.head_dim, [&](int64_t e) { d_k[row * call.head_dim + e] = round_to<T>(sums[e]); });
}

template <class T>
struct IndexLossCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<IndexLossAttributes>();
    if (args.in<A>(3) == nullptr) return clear(args, args.out<A>(0), sizeof(A));
    const IndexCall<T> call(args, a.index);
    const int64_t queries = call.rows.queries();
    A* of_query = reinterpret_cast<A*>(args.scratch);
    const bool packs = is_made_of_packs<T>(a.index.head_dim);
    launch(args, {index_blocks(a.index), kIndexLossThreads},
           packs ? index_loss_kernel<T, Pack<T>::kElements> : index_loss_kernel<T, 1>, call,
           TargetCall<T>(args), of_query, of_query + queries);
    launch(args, {1, kIndexLossThreads}, index_loss_sum_kernel<A>, of_query, queries,
           a.coefficient / static_cast<double>(queries), args.out<A>(0));
  }
};

template <class T>
struct IndexLossGradientCuda {
  using A = accumulation_t<T>;

  static void run(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<IndexLossAttributes>();
    if (args.in<A>(3) == nullptr) {
      for (int i = 0; i < 3; ++i) {
        const CudaTensor& gradient = args.output(i);
        clear(args, gradient.data,
              static_cast<size_t>(gradient.shape.elements()) * size_of(gradient.dtype));
      }
      return;
    }
    if (is_made_of_packs<T>(a.index.head_dim)) {
      run_in_steps<Pack<T>::kElements>(args, a);
    } else {
      run_in_steps<1>(args, a);
    }
  }

 private:
  template <int kStep>
  static void run_in_steps(const CudaKernelArguments& args, const IndexLossAttributes& a) {
    const IndexCall<T> call(args, a.index);
    const TargetCall<T> targets(args);
    const int64_t queries = call.rows.queries();
    A* d_scores = reinterpret_cast<A*>(args.scratch);
    launch(args, {static_cast<unsigned>(queries), kIndexLossThreads},
           index_score_gradient_kernel<T, kStep>, call, targets, args.in<A>(6),
           a.coefficient / static_cast<double>(queries), d_scores);
    const size_t shared_bytes = sizeof(A) * static_cast<size_t>(call.head_dim);
    launch(args,
           {dim3(static_cast<unsigned>(call.heads), static_cast<unsigned>(queries)),
            kIndexGradientThreads, shared_bytes},
           index_query_gradient_kernel<T, kStep>, call, targets, d_scores, args.out<T>(0),
           args.out<A>(2));
    launch(args, {static_cast<unsigned>(call.rows.keys()), kIndexGradientThreads, shared_bytes},
           index_key_gradient_kernel<T, kStep>, call, targets, d_scores, args.out<T>(1));
  }
};

}  // namespace

CudaKernel index_loss_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<IndexLossCuda>(op.input(0).dtype);
}

CudaKernel index_loss_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<IndexLossGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
