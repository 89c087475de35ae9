#include "ops/losses/cross_entropy/cross_entropy.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr unsigned kTokenThreads = 512;

// e^(logit - largest), of numbers that the two functions before it have scaled. For bf16 and f16
// the instruction for powers of two on logits times log2(e), which takes 3 instructions where exp()
// takes 10: with that one the multiprocessors would be slower than memory. Scaling is off by half
// a last place of `largest`, as the logarithm that is made of it is, too.
constexpr float kLog2E = 1.4426950408889634F;

template <class T>
__device__ __forceinline__ accumulation_t<T> scaled(accumulation_t<T> logit) {
  if constexpr (sizeof(T) == 2) return logit * kLog2E;
  return logit;
}
template <class T>
__device__ __forceinline__ accumulation_t<T> exp_of_difference(accumulation_t<T> logit,
                                                               accumulation_t<T> scaled_largest) {
  if constexpr (sizeof(T) == 2) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fmaf(logit, kLog2E, -scaled_largest)));
    return power;
  }
  return exp(logit - scaled_largest);
}

// The largest of the elements of packs; NaN is passed over.
template <int kStep, int kPacks, class T>
__device__ __forceinline__ accumulation_t<T> largest_of(const Pack<T> (&packs)[kPacks]) {
  using A = accumulation_t<T>;
  A largest = -infinity<A>();
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
#pragma unroll
    for (int j = 0; j < kStep; ++j) largest = fmax(largest, widen(packs[p].values[j]));
  }
  return largest;
}

// Over a row of logits, by a block: the largest, and the sum of the exponentials of the differences
// from it. The online form reads the row once; the threads' parts are then combined in order.
template <class A>
struct RowSum {
  A largest;
  A total;
};

template <class T, int kStep>
__device__ RowSum<accumulation_t<T>> sum_exponentials(const T* row, int64_t vocabulary,
                                                      accumulation_t<T>* shared) {
  using A = accumulation_t<T>;
  A largest = -infinity<A>();
  A total = 0;
  const auto add = [&]<int kPacks>(const Pack<T>(&packs)[kPacks]) {
    const A packs_largest = largest_of<kStep>(packs);
    if (packs_largest > largest) {
      total *= exp(largest - packs_largest);
      largest = packs_largest;
    }
    // As long as there is nothing but -infinity it adds nothing; NaN is not lost.
    const A shift = largest == -infinity<A>() ? A(0) : scaled<T>(largest);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        total += exp_of_difference<T>(widen(packs[p].values[j]), shift);
      }
    }
  };
  // Two steps are on their way at once.
  const int64_t stride = int64_t{blockDim.x} * kStep;
  int64_t v = int64_t{threadIdx.x} * kStep;
  for (; v + stride < vocabulary; v += 2 * stride) {
    const Pack<T> packs[] = {load_step<T, kStep>(row + v), load_step<T, kStep>(row + v + stride)};
    add(packs);
  }
  if (v < vocabulary) {
    const Pack<T> packs[] = {load_step<T, kStep>(row + v)};
    add(packs);
  }
  const A of_all = block_max(largest, shared);
  // A thread without elements has -infinity, and adds nothing.
  const A scaled_total = largest == of_all ? total : total * exp(largest - of_all);
  return {of_all, block_sum(scaled_total, shared)};
}

// A block for each token.
template <class T, int kStep>
__global__ void cross_entropy_kernel(const T* logits, const int32_t* labels,
                                     const accumulation_t<T>* mask, accumulation_t<T>* lse,
                                     double* losses, int64_t vocabulary) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t t = blockIdx.x;
  const T* row = logits + t * vocabulary;
  const RowSum<A> sums = sum_exponentials<T, kStep>(row, vocabulary, shared);
  if (threadIdx.x != 0) return;
  const A log_sum = sums.largest + log(sums.total);
  lse[t] = log_sum;
  double loss = 0;
  if (mask[t] != A(0) && labels[t] >= 0 && labels[t] < vocabulary) {
    loss = static_cast<double>(mask[t]) *
           (static_cast<double>(log_sum) - static_cast<double>(widen(row[labels[t]])));
  }
  losses[t] = loss;
}

// What every token's loss is divided by: the sum of the mask, or what is given. By one block.
template <class A>
__device__ double token_divisor(const A* mask, const A* given, int64_t tokens, double* shared) {
  double total = 0;
  if (given != nullptr) {
    total = static_cast<double>(*given);
  } else {
    for_row(tokens, [&](int64_t t) { total += static_cast<double>(mask[t]); });
    total = block_sum(total, shared);
  }
  return total > 1.0 ? total : 1.0;
}

template <class A>
__global__ void mean_loss_kernel(const double* losses, const A* mask, const A* given, A* loss,
                                 int64_t tokens) {
  __shared__ double shared[32];
  double sum = 0;
  for_row(tokens, [&](int64_t t) { sum += losses[t]; });
  sum = block_sum(sum, shared);
  const double divisor = token_divisor(mask, given, tokens, shared);
  if (threadIdx.x == 0) *loss = static_cast<A>(sum / divisor);
}

template <class T>
struct CrossEntropyCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& shape = args.input(0).shape;
    auto* losses = reinterpret_cast<double*>(args.scratch);
    launch(args, {static_cast<unsigned>(shape[0]), kTokenThreads},
           is_made_of_packs<T>(shape[1]) ? cross_entropy_kernel<T, Pack<T>::kElements>
                                         : cross_entropy_kernel<T, 1>,
           args.in<T>(0), args.in<int32_t>(1), args.in<A>(2), args.out<A>(1), losses, shape[1]);
    launch(args, {1, 1024}, mean_loss_kernel<A>, losses, args.in<A>(2), args.in<A>(3),
           args.out<A>(0), shape[0]);
  }
};

template <class T, int kStep>
__global__ void cross_entropy_part_kernel(const T* logits, const int32_t* labels,
                                          accumulation_t<T>* part, int64_t vocabulary) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t t = blockIdx.x;
  const T* row = logits + t * vocabulary;
  const RowSum<A> sums = sum_exponentials<T, kStep>(row, vocabulary, shared);
  if (threadIdx.x != 0) return;
  part[3 * t] = sums.largest;
  part[3 * t + 1] = sums.total;
  const bool here = labels[t] >= 0 && labels[t] < vocabulary;
  part[3 * t + 2] = here ? widen(row[labels[t]]) : A(0);
}

template <class T>
struct CrossEntropyPartCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    launch(args, {static_cast<unsigned>(shape[0]), kTokenThreads},
           is_made_of_packs<T>(shape[1]) ? cross_entropy_part_kernel<T, Pack<T>::kElements>
                                         : cross_entropy_part_kernel<T, 1>,
           args.in<T>(0), args.in<int32_t>(1), args.out<accumulation_t<T>>(0), shape[1]);
  }
};

template <class A>
__global__ void cross_entropy_of_parts_kernel(const A* mask, const A* all, A* lse, double* losses,
                                              int64_t tokens, int64_t parts) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  A largest = all[3 * t];
  for (int64_t p = 1; p < parts; ++p) {
    const A other = all[3 * (p * tokens + t)];
    largest = largest < other ? other : largest;
  }
  A total = 0;
  A label = 0;
  for (int64_t p = 0; p < parts; ++p) {
    const A* part = all + 3 * (p * tokens + t);
    total += part[1] * exp(part[0] - largest);
    label += part[2];
  }
  const A log_sum = largest + log(total);
  lse[t] = log_sum;
  losses[t] = mask[t] == A(0) ? 0
                              : static_cast<double>(mask[t]) *
                                    (static_cast<double>(log_sum) - static_cast<double>(label));
}

template <class T>
struct CrossEntropyOfPartsCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const int64_t tokens = args.input(0).shape[0];
    auto* losses = reinterpret_cast<double*>(args.scratch);
    launch(args, {static_cast<unsigned>(ceil_divide(tokens, 256)), 256},
           cross_entropy_of_parts_kernel<A>, args.in<A>(2), args.in<A>(3), args.out<A>(1), losses,
           tokens, args.input(3).shape[0] / tokens);
    launch(args, {1, 1024}, mean_loss_kernel<A>, losses, args.in<A>(2), args.in<A>(4),
           args.out<A>(0), tokens);
  }
};

template <class A>
__global__ void token_divisor_kernel(const A* mask, const A* given, int64_t tokens,
                                     double* divisor) {
  __shared__ double shared[32];
  const double value = token_divisor(mask, given, tokens, shared);
  if (threadIdx.x == 0) *divisor = value;
}

// d_logits may be the logits: the label's own is computed before anything is written.
template <class T, int kStep>
__global__ void cross_entropy_gradient_kernel(const T* logits, const int32_t* labels,
                                              const accumulation_t<T>* mask,
                                              const accumulation_t<T>* lse,
                                              const accumulation_t<T>* d_loss,
                                              const double* divisor, T* d_logits,
                                              int64_t vocabulary) {
  using A = accumulation_t<T>;
  const int64_t t = blockIdx.x;
  const T* row = logits + t * vocabulary;
  T* out = d_logits + t * vocabulary;
  if (mask[t] == A(0)) {
    Pack<T> zero;
#pragma unroll
    for (int j = 0; j < kStep; ++j) zero.values[j] = round_to<T>(A(0));
    for_row_steps<kStep>(vocabulary, [=](int64_t v) { store_step<T, kStep>(out + v, zero); });
    return;
  }
  const double scale = static_cast<double>(*d_loss) / *divisor;
  const A factor = static_cast<A>(scale * static_cast<double>(mask[t]));
  const A shift = lse[t];
  const int32_t label = labels[t];
  for_row_steps<kStep>(vocabulary, [=](int64_t v) {
    const Pack<T> values = load_step<T, kStep>(row + v);
    Pack<T> result;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      A probability = exp(widen(values.values[j]) - shift);
      if (v + j == label) probability -= A(1);
      result.values[j] = round_to<T>(factor * probability);
    }
    store_step<T, kStep>(out + v, result);
  });
}

template <class T>
struct CrossEntropyGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& shape = args.input(0).shape;
    auto* divisor = reinterpret_cast<double*>(args.scratch);
    launch(args, {1, 1024}, token_divisor_kernel<A>, args.in<A>(2), args.in<A>(5), shape[0],
           divisor);
    launch(args, {static_cast<unsigned>(shape[0]), kTokenThreads},
           is_made_of_packs<T>(shape[1]) ? cross_entropy_gradient_kernel<T, Pack<T>::kElements>
                                         : cross_entropy_gradient_kernel<T, 1>,
           args.in<T>(0), args.in<int32_t>(1), args.in<A>(2), args.in<A>(3), args.in<A>(4), divisor,
           args.out<T>(0), shape[1]);
  }
};

}  // namespace

CudaKernel cross_entropy_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<CrossEntropyCuda>(op.input(0).dtype);
}

CudaKernel cross_entropy_part_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<CrossEntropyPartCuda>(op.input(0).dtype);
}

CudaKernel cross_entropy_of_parts_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<CrossEntropyOfPartsCuda>(op.input(0).dtype);
}

CudaKernel cross_entropy_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<CrossEntropyGradientCuda>(op.input(0).dtype);
}

// The loss of each token, or what they are divided by.
}  // namespace troupe
