#include "ops/cuda/held_row.cuh"
#include "ops/cuda/row_sums.cuh"
#include "ops/norms/rms_norm/rms_norm.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A block for each row.
template <class T, int kStep>
__global__ void __launch_bounds__(kHeldThreads, 2)
    rms_norm_kernel(const T* x, const accumulation_t<T>* gamma, const T* delta, T* y,
                    accumulation_t<T>* rstd, T* sum, LiveRows rows, int64_t n,
                    RmsNormAttributes attributes) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const int64_t first = row * n;
  const HeldRow<T, kStep, 2> held({x + first, delta != nullptr ? delta + first : nullptr}, n);
  const auto add_delta = [=](const Pack<T>(&packs)[2], A(&s)[kStep]) {
#pragma unroll
    for (int j = 0; j < kStep; ++j) s[j] = widen(packs[0].values[j]);
    if (delta == nullptr) return;
#pragma unroll
    for (int j = 0; j < kStep; ++j) s[j] += widen(packs[1].values[j]);
  };
  A squares = 0;
  held.for_steps([&](int64_t, const Pack<T>(&packs)[2]) {
    A s[kStep];
    add_delta(packs, s);
#pragma unroll
    for (int j = 0; j < kStep; ++j) squares += s[j] * s[j];
  });
  squares = block_sum(squares, shared);
  const A scale = A(1) / sqrt(squares / static_cast<A>(n) + static_cast<A>(attributes.epsilon));
  if (threadIdx.x == 0) rstd[row] = scale;
  const A offset = attributes.zero_centered ? A(1) : A(0);
  held.for_steps([&](int64_t i, const Pack<T>(&packs)[2]) {
    A s[kStep];
    add_delta(packs, s);
    A gains[kStep];
    load_numbers(gamma + i, gains);
    Pack<T> normed;
    Pack<T> summed;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      normed.values[j] = round_to<T>(s[j] * scale * (offset + gains[j]));
      summed.values[j] = round_to<T>(s[j]);
    }
    store_step<T, kStep>(y + first + i, normed);
    if (delta != nullptr) store_step<T, kStep>(sum + first + i, summed);
  });
}

template <class T>
struct RmsNormCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const T* delta = args.in<T>(2);
    launch_on_held_rows<T>(args, rms_norm_kernel<T, Pack<T>::kElements>, rms_norm_kernel<T, 1>,
                           args.attributes->as<RmsNormAttributes>(), args.in<T>(0), args.in<A>(1),
                           delta, args.out<T>(0), args.out<A>(1),
                           delta != nullptr ? args.out<T>(2) : nullptr);
  }
};

// dx may be d_sum.
template <class T, int kStep>
__global__ void __launch_bounds__(kHeldThreads, 2)
    rms_norm_gradient_kernel(const T* dy, const T* s, const accumulation_t<T>* gamma,
                             const accumulation_t<T>* rstd, const T* d_sum, T* dx, LiveRows rows,
                             int64_t n, bool zero_centered) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const int64_t first = row * n;
  const HeldRow<T, kStep, 3> held(
      {dy + first, s + first, d_sum != nullptr ? d_sum + first : nullptr}, n);
  const A scale = rstd[row];
  const A offset = zero_centered ? A(1) : A(0);
  A projection = 0;
  held.for_steps([&](int64_t i, const Pack<T>(&packs)[3]) {
    A gains[kStep];
    load_numbers(gamma + i, gains);
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      projection += widen(packs[0].values[j]) * (offset + gains[j]) * widen(packs[1].values[j]);
    }
  });
  projection = block_sum(projection, shared);
  const A along = scale * scale * scale * projection / static_cast<A>(n);
  held.for_steps([&](int64_t i, const Pack<T>(&packs)[3]) {
    A gains[kStep];
    load_numbers(gamma + i, gains);
    Pack<T> result;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      const A g = widen(packs[0].values[j]) * (offset + gains[j]);
      A gradient = scale * g - along * widen(packs[1].values[j]);
      if (d_sum != nullptr) gradient += widen(packs[2].values[j]);
      result.values[j] = round_to<T>(gradient);
    }
    store_step<T, kStep>(dx + first + i, result);
  });
}

template <class T>
struct RmsNormGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    launch_on_held_rows<T>(
        args, rms_norm_gradient_kernel<T, Pack<T>::kElements>, rms_norm_gradient_kernel<T, 1>,
        args.attributes->as<RmsNormAttributes>().zero_centered, args.in<T>(0), args.in<T>(1),
        args.in<A>(2), args.in<A>(3), args.in<T>(4), args.out<T>(0));
  }
};

template <class T, int kStep>
struct GainTerm {
  using A = accumulation_t<T>;
  struct Loaded {
    RawStep<T, kStep> d, x;
    A scale;
  };
  const T* dy;
  const T* s;
  const A* rstd;
  int64_t n;
  __device__ Loaded load(int64_t row, int64_t i) const {
    return {load_raw<T, kStep>(dy + row * n + i), load_raw<T, kStep>(s + row * n + i), rstd[row]};
  }
  __device__ void add(const Loaded& row, A (&sums)[kStep]) const {
    const Pack<T> d = unpack(row.d);
    const Pack<T> x = unpack(row.x);
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      sums[j] += widen(d.values[j]) * widen(x.values[j]) * row.scale;
    }
  }
};

template <class T>
struct RmsNormWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const int64_t n = args.input(0).shape[1];
    sum_rows<T, GainTerm>(args, LiveRows(args.input(0)), n, is_made_of_packs<T>(n), args.out<A>(0),
                          args.attributes->as<RmsNormWeightGradientAttributes>().accumulate,
                          args.in<T>(0), args.in<T>(1), args.in<A>(2), n);
  }
};

}  // namespace

CudaKernel rms_norm_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<RmsNormCuda>(op.output(0).dtype);
}

CudaKernel rms_norm_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<RmsNormGradientCuda>(op.output(0).dtype);
}

CudaKernel rms_norm_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<RmsNormWeightGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
