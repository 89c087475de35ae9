#include "ops/cuda/device.cuh"
#include "ops/cuda/row_sums.cuh"
#include "ops/layer_norm/layer_norm.h"

namespace troupe {
namespace {

// A block for each row.
template <class T>
__global__ void layer_norm_kernel(const T* x, const accumulation_t<T>* gamma,
                                  const accumulation_t<T>* beta, const T* delta, T* y,
                                  accumulation_t<T>* means, accumulation_t<T>* rstds, T* sums,
                                  LiveRows rows, int64_t n, LayerNormAttributes attributes) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const int64_t first = row * n;
  const auto element = [=](int64_t i) {
    const A value = widen(x[first + i]);
    return delta != nullptr ? value + widen(delta[first + i]) : value;
  };
  A total = 0;
  for_row(n, [&](int64_t i) { total += element(i); });
  const A mean = block_sum(total, shared) / static_cast<A>(n);
  A squares = 0;
  for_row(n, [&](int64_t i) {
    const A centered = element(i) - mean;
    squares += centered * centered;
  });
  const A variance = block_sum(squares, shared) / static_cast<A>(n);
  const A rstd = A(1) / sqrt(variance + static_cast<A>(attributes.epsilon));
  if (threadIdx.x == 0) {
    means[row] = mean;
    rstds[row] = rstd;
  }
  const A offset = attributes.zero_centered ? A(1) : A(0);
  for_row(n, [=](int64_t i) {
    const A s = element(i);
    y[first + i] = round_to<T>((s - mean) * rstd * (offset + gamma[i]) + beta[i]);
    if (delta != nullptr) sums[first + i] = round_to<T>(s);
  });
}

template <class T>
struct LayerNormCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& shape = args.input(0).shape;
    const T* delta = args.in<T>(3);
    launch(args, {static_cast<unsigned>(shape[0]), threads_for_row(shape[1], 4)},
           layer_norm_kernel<T>, args.in<T>(0), args.in<A>(1), args.in<A>(2), delta, args.out<T>(0),
           args.out<A>(1), args.out<A>(2), delta != nullptr ? args.out<T>(3) : nullptr,
           LiveRows(args.input(0)), shape[1], args.attributes->as<LayerNormAttributes>());
  }
};

// dx may be d_sums.
template <class T>
__global__ void layer_norm_gradient_kernel(const T* dy, const T* sums,
                                           const accumulation_t<T>* gamma,
                                           const accumulation_t<T>* means,
                                           const accumulation_t<T>* rstds, const T* d_sums, T* dx,
                                           LiveRows rows, int64_t n, bool zero_centered) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const int64_t first = row * n;
  const A mean = means[row];
  const A rstd = rstds[row];
  const A offset = zero_centered ? A(1) : A(0);
  const auto g = [=](int64_t i) { return widen(dy[first + i]) * (offset + gamma[i]); };
  const auto z = [=](int64_t i) { return (widen(sums[first + i]) - mean) * rstd; };
  A g_sum = 0;
  A along_sum = 0;
  for_row(n, [&](int64_t i) {
    g_sum += g(i);
    along_sum += g(i) * z(i);
  });
  const A g_mean = block_sum(g_sum, shared) / static_cast<A>(n);
  const A along = block_sum(along_sum, shared) / static_cast<A>(n);
  for_row(n, [=](int64_t i) {
    const A gradient = rstd * (g(i) - g_mean - z(i) * along);
    dx[first + i] = round_to<T>(d_sums != nullptr ? widen(d_sums[first + i]) + gradient : gradient);
  });
}

template <class T>
struct LayerNormGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& shape = args.input(0).shape;
    launch(args, {static_cast<unsigned>(shape[0]), threads_for_row(shape[1], 4)},
           layer_norm_gradient_kernel<T>, args.in<T>(0), args.in<T>(1), args.in<A>(2),
           args.in<A>(3), args.in<A>(4), args.in<T>(5), args.out<T>(0), LiveRows(args.input(0)),
           shape[1], args.attributes->as<LayerNormAttributes>().zero_centered);
  }
};

template <class T, int kStep>
struct CenteredGainTerm {
  const T* dy;
  const T* sums;
  const accumulation_t<T>* means;
  const accumulation_t<T>* rstds;
  int64_t n;
  __device__ void operator()(int64_t row, int64_t i, accumulation_t<T> (&to)[kStep]) const {
    const Pack<T> d = load_step<T, kStep>(dy + row * n + i);
    const Pack<T> s = load_step<T, kStep>(sums + row * n + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      to[j] += widen(d.values[j]) * ((widen(s.values[j]) - means[row]) * rstds[row]);
    }
  }
};

template <class T>
struct LayerNormWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const int64_t n = args.input(0).shape[1];
    sum_rows<T, CenteredGainTerm>(
        args, LiveRows(args.input(0)), n, is_made_of_packs<T>(n), args.out<A>(0),
        args.attributes->as<LayerNormWeightGradientAttributes>().accumulate, args.in<T>(0),
        args.in<T>(1), args.in<A>(2), args.in<A>(3), n);
  }
};

template <class T>
struct LayerNormBiasGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const int64_t n = args.input(0).shape[1];
    sum_rows<T, RowTerm>(
        args, LiveRows(args.input(0)), n, is_made_of_packs<T>(n), args.out<accumulation_t<T>>(0),
        args.attributes->as<LayerNormBiasGradientAttributes>().accumulate, args.in<T>(0), n);
  }
};

}  // namespace

CudaKernel layer_norm_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<LayerNormCuda>(op.output(0).dtype);
}

CudaKernel layer_norm_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<LayerNormGradientCuda>(op.output(0).dtype);
}

CudaKernel layer_norm_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<LayerNormWeightGradientCuda>(op.input(0).dtype);
}

CudaKernel layer_norm_bias_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<LayerNormBiasGradientCuda>(op.input(0).dtype);
}

// Of both.
uint64_t layer_norm_sums_cuda_scratch_bytes(const OpView& op) {
  const Shape& shape = op.input(0).shape;
  return row_sums_bytes(accumulation_dtype(op.input(0).dtype), shape[0], shape[1]);
}

}  // namespace troupe
