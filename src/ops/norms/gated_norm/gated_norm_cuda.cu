#include "ops/cuda/row_sums.cuh"
#include "ops/norms/gated_norm/gated_norm.h"
#include "ops/norms/gated_norm/gated_norm_pieces.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kNormThreads = 256;
constexpr int kNormWarps = kNormThreads / 32;

// The head of this warp, of all rows together; a lane has every 32nd element.
__device__ __forceinline__ int64_t head_of_warp() {
  return int64_t{blockIdx.x} * kNormWarps + threadIdx.x / 32;
}

template <class T>
__device__ __forceinline__ accumulation_t<T> head_rstd(const T* x, int64_t n, double epsilon) {
  using A = accumulation_t<T>;
  A sum = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) sum += widen(x[i]) * widen(x[i]);
  return A(1) / sqrt(warp_sum(sum) / static_cast<A>(n) + static_cast<A>(epsilon));
}

template <class T>
__global__ void gated_norm_kernel(const T* x, const T* gate, const accumulation_t<T>* gamma, T* y,
                                  int64_t heads, GatedNormAttributes attributes) {
  using A = accumulation_t<T>;
  const int64_t head = head_of_warp();
  if (head >= heads) return;
  const int64_t n = attributes.head_dim;
  const int64_t first = head * n;
  const A rstd = head_rstd(x + first, n, attributes.epsilon);
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
    const A g = widen(gate[first + i]);
    y[first + i] = round_to<T>(widen(x[first + i]) * rstd * gamma[i] * g * sigmoid(g));
  }
}

// dx may be dy: an element is written by the lane that read it last.
template <class T>
__global__ void gated_norm_gradient_kernel(const T* dy, const T* x, const T* gate,
                                           const accumulation_t<T>* gamma, T* dx, T* d_gate,
                                           int64_t heads, GatedNormAttributes attributes) {
  using A = accumulation_t<T>;
  const int64_t head = head_of_warp();
  if (head >= heads) return;
  const int64_t n = attributes.head_dim;
  const int64_t first = head * n;
  const A rstd = head_rstd(x + first, n, attributes.epsilon);
  A along = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
    const A g = widen(gate[first + i]);
    along += widen(dy[first + i]) * g * sigmoid(g) * gamma[i] * widen(x[first + i]);
  }
  along = warp_sum(along) * rstd * rstd / static_cast<A>(n);
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
    const A g = widen(gate[first + i]);
    const A s = sigmoid(g);
    const A d = widen(dy[first + i]);
    const A value = widen(x[first + i]);
    d_gate[first + i] = round_to<T>(d * value * rstd * gamma[i] * s * (A(1) + g * (A(1) - s)));
    dx[first + i] = round_to<T>(rstd * (d * g * s * gamma[i] - value * along));
  }
}

// A block for each piece of the heads; `partial` has [pieces, n]. Shared memory: [warps, n].
template <class T>
__global__ void gated_norm_weight_gradient_kernel(const T* dy, const T* x, const T* gate,
                                                  accumulation_t<T>* partial, int64_t heads,
                                                  int64_t piece, GatedNormAttributes attributes) {
  using A = accumulation_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto* sums = reinterpret_cast<A*>(memory);
  const int64_t n = attributes.head_dim;
  const int64_t warp = threadIdx.x / 32;
  A* own = sums + warp * n;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) own[i] = 0;
  const int64_t begin = int64_t{blockIdx.x} * piece;
  const int64_t end = begin + piece < heads ? begin + piece : heads;
  for (int64_t head = begin + warp; head < end; head += kNormWarps) {
    const int64_t first = head * n;
    const A rstd = head_rstd(x + first, n, attributes.epsilon);
    for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
      const A g = widen(gate[first + i]);
      own[i] += widen(dy[first + i]) * g * sigmoid(g) * widen(x[first + i]) * rstd;
    }
  }
  __syncthreads();
  for_row(n, [=](int64_t i) {
    A sum = sums[i];
    for (int other = 1; other < kNormWarps; ++other) sum += sums[other * n + i];
    partial[int64_t{blockIdx.x} * n + i] = sum;
  });
}

template <class T>
struct GatedNormCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<GatedNormAttributes>();
    const int64_t heads = args.input(0).shape.elements() / attributes.head_dim;
    launch(args, {static_cast<unsigned>(ceil_divide(heads, kNormWarps)), kNormThreads},
           gated_norm_kernel<T>, args.in<T>(0), args.in<T>(1), args.in<A>(2), args.out<T>(0), heads,
           attributes);
  }
};

template <class T>
struct GatedNormGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<GatedNormAttributes>();
    const int64_t heads = args.input(0).shape.elements() / attributes.head_dim;
    launch(args, {static_cast<unsigned>(ceil_divide(heads, kNormWarps)), kNormThreads},
           gated_norm_gradient_kernel<T>, args.in<T>(0), args.in<T>(1), args.in<T>(2),
           args.in<A>(3), args.out<T>(0), args.out<T>(1), heads, attributes);
  }
};

template <class T>
struct GatedNormWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<GatedNormAttributes>();
    const int64_t n = attributes.head_dim;
    const int64_t heads = args.input(0).shape.elements() / n;
    const int64_t pieces = gated_norm_pieces(heads);
    const size_t shared = static_cast<size_t>(kNormWarps * n) * sizeof(A);
    auto* partial = reinterpret_cast<A*>(args.scratch);
    allow_shared_bytes(gated_norm_weight_gradient_kernel<T>, shared);
    launch(args, {static_cast<unsigned>(pieces), kNormThreads, shared},
           gated_norm_weight_gradient_kernel<T>, args.in<T>(0), args.in<T>(1), args.in<T>(2),
           partial, heads, ceil_divide(heads, pieces), attributes);
    add_pieces(args, partial, pieces, n, args.out<A>(0), attributes.accumulate);
  }
};

}  // namespace

CudaKernel gated_norm_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<GatedNormCuda>(op.input(0).dtype);
}

CudaKernel gated_norm_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<GatedNormGradientCuda>(op.input(0).dtype);
}

CudaKernel gated_norm_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<GatedNormWeightGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
