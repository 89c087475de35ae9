#include "ops/attention/attention_target/attention_target.h"
#include "ops/attention/sparse_attention/key_dots.cuh"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kTargetWarps = 8;

// A block for each query. Its warps share the keys; the heads follow each other.
template <class T>
__global__ void attention_target_kernel(const T* q, const T* k, const int32_t* chosen,
                                        const int32_t* starts, accumulation_t<T>* target,
                                        int64_t most, KeyRows rows, int heads, int key_dim,
                                        accumulation_t<T> scale) {
  using A = accumulation_t<T>;
  __shared__ A largest_of[kTargetWarps];
  __shared__ A total_of[kTargetWarps];
  const int64_t query = blockIdx.x;
  const int64_t sequence = query / rows.rows;
  const KeyPositions positions = chosen != nullptr ? chosen_positions(chosen, query, most)
                                                   : visible_positions(rows, starts, query);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  A* row = target + query * most;
  for_row(most, [&](int64_t i) { row[i] = 0; });
  row += positions.first;
  for (int head = 0; head < heads; ++head) {
    const T* of_head = q + (query * heads + head) * key_dim;
    const auto score = [&](int64_t i) {
      return scale * warp_dot(of_head, k + rows.key(sequence, positions[i]) * key_dim, key_dim);
    };
    A largest = -infinity<A>();
    A total = 0;
    for (int64_t i = warp; i < positions.count; i += kTargetWarps) {
      const A own = score(i);
      const A now = own > largest ? own : largest;
      total = total * exp(largest - now) + exp(own - now);
      largest = now;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      largest_of[warp] = largest;
      total_of[warp] = total;
    }
    __syncthreads();
    for (int i = 0; i < kTargetWarps; ++i) {
      if (largest_of[i] > largest) largest = largest_of[i];
    }
    total = 0;
    for (int i = 0; i < kTargetWarps; ++i) total += total_of[i] * exp(largest_of[i] - largest);
    for (int64_t i = warp; i < positions.count; i += kTargetWarps) {
      const A p = exp(score(i) - largest) / total;
      if (threadIdx.x % 32 == 0) row[i] += p;
    }
  }
}

template <class T>
struct AttentionTargetCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<SparseAttentionAttributes>();
    launch(args, {static_cast<unsigned>(a.rows().queries()), 32 * kTargetWarps},
           attention_target_kernel<T>, args.in<T>(0), args.in<T>(1), args.in<int32_t>(2),
           args.in<int32_t>(3), args.out<A>(0), args.output(0).shape[1], a.rows(), a.heads,
           a.key_dim, a.scale);
  }
};

}  // namespace

CudaKernel attention_target_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<AttentionTargetCuda>(op.input(0).dtype);
}

}  // namespace troupe
