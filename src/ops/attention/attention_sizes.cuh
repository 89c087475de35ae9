// What the CUDA kernels of attention share: sizes, visibility and dropout of a call, and the
// operands of its gradient. Private to this folder.
#pragma once

#include "ops/attention/attention.h"
#include "ops/cuda/device.cuh"
#include "ops/cuda/random.cuh"

namespace troupe {
namespace {

struct AttentionSizes {
  int64_t sequence;
  int heads;
  int groups;
  int head_dim;
  int64_t window;
  double scale;
  int first_head;
  int all_heads;
  bool drops;
  DeviceDropout dropout;
  const int64_t* step;

  AttentionSizes(const AttentionAttributes& a, const int64_t* step_of_run)
      : sequence(a.sequence),
        heads(a.heads),
        groups(a.groups),
        head_dim(a.head_dim),
        window(a.window),
        scale(a.scale),
        first_head(a.first_head),
        all_heads(a.all_heads == 0 ? a.heads : a.all_heads),
        drops(step_of_run != nullptr),
        dropout(a.seed, a.substream, a.probability),
        step(step_of_run) {}

  __device__ int64_t qkv_stride() const { return int64_t{heads + 2 * groups} * head_dim; }
  __device__ int64_t out_stride() const { return int64_t{heads} * head_dim; }
  __device__ bool sees(int64_t query, int64_t key) const {
    return key <= query && query < sequence && (window == 0 || key > query - window);
  }
  // The first key that query `query` sees.
  __device__ int64_t first_key(int64_t query) const {
    return window == 0 || query < window ? 0 : query - window + 1;
  }
  // Is a probability kept? `head` is that of this call in sequence b.
  __device__ bool keeps(uint64_t seed, int64_t b, int head, int64_t query, int64_t key) const {
    const int64_t number = b * all_heads + first_head + head;
    const int64_t row = (sequence + 3) / 4 * 4;
    return dropout.keeps(seed, static_cast<uint64_t>((number * sequence + query) * row + key));
  }
};

// D of each token and head: a warp each.
template <class T>
__global__ void out_dot_kernel(const T* d_out, const T* out, accumulation_t<T>* out_dot,
                               int64_t count, int d) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (i >= count) return;
  accumulation_t<T> sum = 0;
  for (int c = static_cast<int>(threadIdx.x) % 32; c < d; c += 32) {
    sum += widen(d_out[i * d + c]) * widen(out[i * d + c]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) out_dot[i] = sum;
}

template <class T>
struct GradientOperands {
  const T* d_out;
  const T* qkv;
  const accumulation_t<T>* lse;
  const accumulation_t<T>* out_dot;
};

// A probability with its gradient's factors.
template <class A>
struct ProbabilityGradient {
  A kept;  // the probability as it multiplies the values
  A ds;
};

// With D computed into the scratch memory.
template <class T>
GradientOperands<T> gradient_operands(const CudaKernelArguments& args) {
  using A = accumulation_t<T>;
  const auto& a = args.attributes->as<AttentionAttributes>();
  auto* out_dot = reinterpret_cast<A*>(args.scratch);
  const int64_t count = int64_t{a.batch} * a.sequence * a.heads;
  launch(args, {static_cast<unsigned>(ceil_divide(count, 8)), 256}, out_dot_kernel<T>,
         args.in<T>(0), args.in<T>(2), out_dot, count, a.head_dim);
  return {args.in<T>(0), args.in<T>(1), args.in<A>(3), out_dot};
}

}  // namespace
}  // namespace troupe
