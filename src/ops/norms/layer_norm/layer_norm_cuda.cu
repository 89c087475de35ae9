#include "ops/cuda/held_row.cuh"
#include "ops/cuda/row_sums.cuh"
#include "ops/norms/layer_norm/layer_norm.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A block for each row.
template <class T, int kStep>
__global__ void __launch_bounds__(kHeldThreads, 2)
    layer_norm_kernel(const T* x, const accumulation_t<T>* gamma, const accumulation_t<T>* beta,
                      const T* delta, T* y, accumulation_t<T>* means, accumulation_t<T>* rstds,
                      T* sums, LiveRows rows, int64_t n, LayerNormAttributes attributes) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const int64_t first = row * n;
  const HeldRow<T, kStep, 2> held({x + first, delta != nullptr ? delta + first : nullptr}, n);
  const auto element = [=](const Pack<T>(&packs)[2], int j) {
    const A value = widen(packs[0].values[j]);
    return delta != nullptr ? value + widen(packs[1].values[j]) : value;
  };
  A total = 0;
  held.for_steps([&](int64_t, const Pack<T>(&packs)[2]) {
#pragma unroll
    for (int j = 0; j < kStep; ++j) total += element(packs, j);
  });
  const A mean = block_sum(total, shared) / static_cast<A>(n);
  A squares = 0;
  held.for_steps([&](int64_t, const Pack<T>(&packs)[2]) {
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      const A centered = element(packs, j) - mean;
      squares += centered * centered;
    }
  });
  const A variance = block_sum(squares, shared) / static_cast<A>(n);
  const A rstd = A(1) / sqrt(variance + static_cast<A>(attributes.epsilon));
  if (threadIdx.x == 0) {
    means[row] = mean;
    rstds[row] = rstd;
  }
  const A offset = attributes.zero_centered ? A(1) : A(0);
  held.for_steps([&](int64_t i, const Pack<T>(&packs)[2]) {
    A gains[kStep];
    A shifts[kStep];
    load_numbers(gamma + i, gains);
    load_numbers(beta + i, shifts);
    Pack<T> normed;
    Pack<T> summed;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      const A s = element(packs, j);
      normed.values[j] = round_to<T>((s - mean) * rstd * (offset + gains[j]) + shifts[j]);
      summed.values[j] = round_to<T>(s);
    }
    store_step<T, kStep>(y + first + i, normed);
    if (delta != nullptr) store_step<T, kStep>(sums + first + i, summed);
  });
}

template <class T>
struct LayerNormCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const T* delta = args.in<T>(3);
    launch_on_held_rows<T>(args, layer_norm_kernel<T, Pack<T>::kElements>, layer_norm_kernel<T, 1>,
                           args.attributes->as<LayerNormAttributes>(), args.in<T>(0), args.in<A>(1),
                           args.in<A>(2), delta, args.out<T>(0), args.out<A>(1), args.out<A>(2),
                           delta != nullptr ? args.out<T>(3) : nullptr);
  }
};

// dx may be d_sums.
template <class T, int kStep>
__global__ void __launch_bounds__(kHeldThreads, 2)
    layer_norm_gradient_kernel(const T* dy, const T* sums, const accumulation_t<T>* gamma,
                               const accumulation_t<T>* means, const accumulation_t<T>* rstds,
                               const T* d_sums, T* dx, LiveRows rows, int64_t n,
                               bool zero_centered) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const int64_t first = row * n;
  const HeldRow<T, kStep, 3> held(
      {dy + first, sums + first, d_sums != nullptr ? d_sums + first : nullptr}, n);
  const A mean = means[row];
  const A rstd = rstds[row];
  const A offset = zero_centered ? A(1) : A(0);
  const auto z = [=](const Pack<T>(&packs)[3], int j) {
    return (widen(packs[1].values[j]) - mean) * rstd;
  };
  A g_sum = 0;
  A along_sum = 0;
  held.for_steps([&](int64_t i, const Pack<T>(&packs)[3]) {
    A gains[kStep];
    load_numbers(gamma + i, gains);
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      const A g = widen(packs[0].values[j]) * (offset + gains[j]);
      g_sum += g;
      along_sum += g * z(packs, j);
    }
  });
  const A g_mean = block_sum(g_sum, shared) / static_cast<A>(n);
  const A along = block_sum(along_sum, shared) / static_cast<A>(n);
  held.for_steps([&](int64_t i, const Pack<T>(&packs)[3]) {
    A gains[kStep];
    load_numbers(gamma + i, gains);
    Pack<T> result;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      const A g = widen(packs[0].values[j]) * (offset + gains[j]);
      const A gradient = rstd * (g - g_mean - z(packs, j) * along);
      result.values[j] =
          round_to<T>(d_sums != nullptr ? widen(packs[2].values[j]) + gradient : gradient);
    }
    store_step<T, kStep>(dx + first + i, result);
  });
}

template <class T>
struct LayerNormGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    launch_on_held_rows<T>(
        args, layer_norm_gradient_kernel<T, Pack<T>::kElements>, layer_norm_gradient_kernel<T, 1>,
        args.attributes->as<LayerNormAttributes>().zero_centered, args.in<T>(0), args.in<T>(1),
        args.in<A>(2), args.in<A>(3), args.in<A>(4), args.in<T>(5), args.out<T>(0));
  }
};

template <class T, int kStep>
struct CenteredGainTerm {
  using A = accumulation_t<T>;
  struct Loaded {
    RawStep<T, kStep> d, s;
    A mean, rstd;
  };
  const T* dy;
  const T* sums;
  const A* means;
  const A* rstds;
  int64_t n;
  __device__ Loaded load(int64_t row, int64_t i) const {
    return {load_raw<T, kStep>(dy + row * n + i), load_raw<T, kStep>(sums + row * n + i),
            means[row], rstds[row]};
  }
  __device__ void add(const Loaded& row, A (&to)[kStep]) const {
    const Pack<T> d = unpack(row.d);
    const Pack<T> s = unpack(row.s);
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      to[j] += widen(d.values[j]) * ((widen(s.values[j]) - row.mean) * row.rstd);
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

}  // namespace troupe
