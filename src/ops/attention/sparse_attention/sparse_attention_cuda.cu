#include "ops/attention/sparse_attention/key_dots.cuh"
#include "ops/attention/sparse_attention/sparse_attention.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kSparseThreads = 128;
constexpr int kSparseChunk = 128;  // keys, or heads, at a time

// What all kernels of a call read.
template <class T>
struct SparseCall {
  const T* q;
  const T* k;
  const int32_t* chosen;
  int64_t most;
  KeyRows rows;
  int heads;
  int key_dim;
  int value_dim;
  accumulation_t<T> scale;

  SparseCall(const CudaKernelArguments& args, const SparseAttentionAttributes& a, int first)
      : q(args.in<T>(first)),
        k(args.in<T>(first + 1)),
        chosen(args.in<int32_t>(first + 2)),
        most(args.input(first + 2).shape[1]),
        rows(a.rows()),
        heads(a.heads),
        key_dim(a.key_dim),
        value_dim(a.value_dim),
        scale(static_cast<accumulation_t<T>>(a.scale)) {}

  __device__ KeyPositions positions(int64_t query) const {
    return chosen_positions(chosen, query, most);
  }
  __device__ const T* key(int64_t query, int64_t position) const {
    return k + rows.key(query / rows.rows, position) * key_dim;
  }
};

// A block for each head of each query. Shared memory: e sums.
template <class T>
__global__ void sparse_attention_kernel(SparseCall<T> call, T* out, accumulation_t<T>* lse) {
  using A = accumulation_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* sums = reinterpret_cast<A*>(memory);
  __shared__ A p[kSparseChunk];
  __shared__ A shared[32];
  const int64_t query = blockIdx.y;
  const int64_t head = query * call.heads + blockIdx.x;
  const KeyPositions positions = call.positions(query);
  const int thread = static_cast<int>(threadIdx.x);
  for (int c = thread; c < call.value_dim; c += kSparseThreads) sums[c] = 0;
  A largest = -infinity<A>();
  A total = 0;
  for (int64_t begin = 0; begin < positions.count; begin += kSparseChunk) {
    const int n = static_cast<int>(min(int64_t{kSparseChunk}, positions.count - begin));
    for (int i = thread / 32; i < n; i += kSparseThreads / 32) {
      const A score = warp_dot(call.q + head * call.key_dim, call.key(query, positions[begin + i]),
                               call.key_dim);
      if (thread % 32 == 0) p[i] = call.scale * score;
    }
    __syncthreads();
    const A own = thread < n ? p[thread] : -infinity<A>();
    const A chunk_largest = block_max(own, shared);
    const A now = chunk_largest > largest ? chunk_largest : largest;
    const A grown = exp(largest - now);
    const A own_p = thread < n ? exp(own - now) : A(0);
    if (thread < n) p[thread] = own_p;
    total = total * grown + block_sum(own_p, shared);
    largest = now;
    for (int c = thread; c < call.value_dim; c += kSparseThreads) {
      A sum = sums[c] * grown;
      for (int i = 0; i < n; ++i) {
        sum += p[i] * widen(call.key(query, positions[begin + i])[c]);
      }
      sums[c] = sum;
    }
    __syncthreads();
  }
  for (int c = thread; c < call.value_dim; c += kSparseThreads) {
    out[head * call.value_dim + c] = round_to<T>(sums[c] / total);
  }
  if (thread == 0) lse[head] = largest + log(total);
}

// p and ds of one head of a query and one key, on all lanes of a warp.
template <class T>
struct SparseGradients {
  using A = accumulation_t<T>;
  const T* d_out;
  const T* out;
  const A* lse;

  // D of a head.
  __device__ A out_dot(const SparseCall<T>& call, int64_t head) const {
    return warp_dot(d_out + head * call.value_dim, out + head * call.value_dim, call.value_dim);
  }
  __device__ A probability(const SparseCall<T>& call, int64_t head, const T* key) const {
    return exp(call.scale * warp_dot(call.q + head * call.key_dim, key, call.key_dim) - lse[head]);
  }
  __device__ A value_dot(const SparseCall<T>& call, int64_t head, const T* key) const {
    return warp_dot(d_out + head * call.value_dim, key, call.value_dim);
  }
};

// d_q. A block for each head of each query. Shared memory: d sums.
template <class T>
__global__ void sparse_query_gradient_kernel(SparseCall<T> call, SparseGradients<T> gradients,
                                             T* d_q) {
  using A = accumulation_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* sums = reinterpret_cast<A*>(memory);
  __shared__ A ds[kSparseChunk];
  const int64_t query = blockIdx.y;
  const int64_t head = query * call.heads + blockIdx.x;
  const KeyPositions positions = call.positions(query);
  const int thread = static_cast<int>(threadIdx.x);
  for (int c = thread; c < call.key_dim; c += kSparseThreads) sums[c] = 0;
  const A out_dot = gradients.out_dot(call, head);
  for (int64_t begin = 0; begin < positions.count; begin += kSparseChunk) {
    const int n = static_cast<int>(min(int64_t{kSparseChunk}, positions.count - begin));
    __syncthreads();
    for (int i = thread / 32; i < n; i += kSparseThreads / 32) {
      const T* key = call.key(query, positions[begin + i]);
      const A p = gradients.probability(call, head, key);
      const A d = gradients.value_dot(call, head, key) - out_dot;
      if (thread % 32 == 0) ds[i] = call.scale * p * d;
    }
    __syncthreads();
    for (int c = thread; c < call.key_dim; c += kSparseThreads) {
      A sum = sums[c];
      for (int i = 0; i < n; ++i) {
        sum += ds[i] * widen(call.key(query, positions[begin + i])[c]);
      }
      sums[c] = sum;
    }
  }
  for (int c = thread; c < call.key_dim; c += kSparseThreads) {
    d_q[head * call.key_dim + c] = round_to<T>(sums[c]);
  }
}

// d_k. A block for each key, which goes through the queries of its sequence in order. Shared
// memory: d sums.
template <class T>
__global__ void sparse_key_gradient_kernel(SparseCall<T> call, SparseGradients<T> gradients,
                                           T* d_k) {
  using A = accumulation_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* sums = reinterpret_cast<A*>(memory);
  __shared__ A p[kSparseChunk];
  __shared__ A ds[kSparseChunk];
  const int64_t row = blockIdx.x;
  const int64_t position = call.rows.key_position(row);
  const int64_t first = call.rows.key_sequence(row) * call.rows.rows;
  const T* key = call.k + row * call.key_dim;
  const int thread = static_cast<int>(threadIdx.x);
  for (int c = thread; c < call.key_dim; c += kSparseThreads) sums[c] = 0;
  for (int64_t query = first; query < first + call.rows.rows; ++query) {
    if (call.rows.position(query) < position) continue;
    if (number_of(call.positions(query), position) < 0) continue;
    for (int begin = 0; begin < call.heads; begin += kSparseChunk) {
      const int n = min(kSparseChunk, call.heads - begin);
      __syncthreads();
      for (int i = thread / 32; i < n; i += kSparseThreads / 32) {
        const int64_t head = query * call.heads + begin + i;
        const A own = gradients.probability(call, head, key);
        const A d = gradients.value_dot(call, head, key) - gradients.out_dot(call, head);
        if (thread % 32 == 0) {
          p[i] = own;
          ds[i] = call.scale * own * d;
        }
      }
      __syncthreads();
      for (int c = thread; c < call.key_dim; c += kSparseThreads) {
        A sum = sums[c];
        for (int i = 0; i < n; ++i) {
          const int64_t head = query * call.heads + begin + i;
          sum += ds[i] * widen(call.q[head * call.key_dim + c]);
          if (c < call.value_dim) {
            sum += p[i] * widen(gradients.d_out[head * call.value_dim + c]);
          }
        }
        sums[c] = sum;
      }
    }
  }
  for (int c = thread; c < call.key_dim; c += kSparseThreads) {
    d_k[row * call.key_dim + c] = round_to<T>(sums[c]);
  }
}

template <class T>
struct SparseAttentionCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<SparseAttentionAttributes>();
    launch(args,
           {dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(a.rows().queries())),
            kSparseThreads, sizeof(A) * static_cast<size_t>(a.value_dim)},
           sparse_attention_kernel<T>, SparseCall<T>(args, a, 0), args.out<T>(0), args.out<A>(1));
  }
};

template <class T>
struct SparseAttentionGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<SparseAttentionAttributes>();
    const SparseCall<T> call(args, a, 1);
    const SparseGradients<T> gradients{args.in<T>(0), args.in<T>(4), args.in<A>(5)};
    const size_t shared_bytes = sizeof(A) * static_cast<size_t>(a.key_dim);
    launch(args,
           {dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(a.rows().queries())),
            kSparseThreads, shared_bytes},
           sparse_query_gradient_kernel<T>, call, gradients, args.out<T>(0));
    launch(args, {static_cast<unsigned>(a.rows().keys()), kSparseThreads, shared_bytes},
           sparse_key_gradient_kernel<T>, call, gradients, args.out<T>(1));
  }
};

}  // namespace

CudaKernel sparse_attention_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<SparseAttentionCuda>(op.input(0).dtype);
}

CudaKernel sparse_attention_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<SparseAttentionGradientCuda>(op.input(1).dtype);
}

}  // namespace troupe
