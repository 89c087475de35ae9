// The scores of an indexer's query on a GPU (index_topk.h has the formula), by plain arithmetic: a
// warp takes a key, each of its lanes some of the heads.
#pragma once

#include "ops/attention/index_topk/index_attributes.h"
#include "program/cuda/device.cuh"

namespace troupe {

template <class T>
struct IndexCall {
  using A = accumulation_t<T>;
  const T* q;
  const T* k;
  const A* w;
  KeyRows rows;
  int heads;
  int head_dim;
  A scale;

  IndexCall(const CudaKernelArguments& args, const IndexAttributes& a)
      : q(args.in<T>(0)),
        k(args.in<T>(1)),
        w(args.in<A>(2)),
        rows(a.rows()),
        heads(a.heads),
        head_dim(a.head_dim),
        scale(static_cast<A>(a.scale())) {}

  __device__ const T* key(int64_t query, int64_t position) const {
    return k + rows.key(query / rows.rows, position) * head_dim;
  }
  // q . k of one head, by one thread.
  template <int kStep>
  __device__ A dot(int64_t query, int head, const T* key) const {
    const T* of_head = q + (query * heads + head) * head_dim;
    A sum = 0;
    for (int e = 0; e < head_dim; e += kStep) {
      const Pack<T> a = load_step<T, kStep>(of_head + e);
      const Pack<T> b = load_step<T, kStep>(key + e);
#pragma unroll
      for (int j = 0; j < kStep; ++j) sum += widen(a.values[j]) * widen(b.values[j]);
    }
    return sum;
  }
  // I, on all lanes of a warp.
  template <int kStep>
  __device__ A score(int64_t query, const T* key) const {
    A sum = 0;
    for (int head = static_cast<int>(threadIdx.x) % 32; head < heads; head += 32) {
      const A product = dot<kStep>(query, head, key);
      if (product > A(0)) sum += w[query * heads + head] * product;
    }
    return scale * warp_sum(sum);
  }
};

// scores[i] of the positions, by all warps of the block.
template <int kStep, class T>
__device__ void score_positions(const IndexCall<T>& call, int64_t query,
                                const KeyPositions& positions, accumulation_t<T>* scores) {
  for (int64_t i = static_cast<int>(threadIdx.x) / 32; i < positions.count;
       i += static_cast<int>(blockDim.x) / 32) {
    const accumulation_t<T> score =
        call.template score<kStep>(query, call.key(query, positions[i]));
    if (threadIdx.x % 32 == 0) scores[i] = score;
  }
}

}  // namespace troupe
