#include "ops/precision/amax_history/amax_history.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kHistoryThreads = 128;

struct DelayedAmaxOutputs {
  float* of_kind[kHistoryKinds];
};

// A block for each history.
__global__ void __launch_bounds__(kHistoryThreads)
    delayed_amax_kernel(const float* history, int64_t steps, DelayedAmaxAttributes attributes,
                        DelayedAmaxOutputs out) {
  const auto row = static_cast<int>(blockIdx.x);
  const float* const own = history + row * steps;
  // Magnitudes are ordered as their bits are.
  uint32_t largest = 0;
  const int64_t count = attributes.most_recent ? 1 : steps;
  for (int64_t i = threadIdx.x; i < count; i += kHistoryThreads) {
    largest = max(largest, __float_as_uint(own[i]));
  }
  __shared__ uint32_t of_warps[kHistoryThreads / 32];
  largest = __reduce_max_sync(0xffffffffU, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const uint32_t of_warp : of_warps) largest = max(largest, of_warp);
  out.of_kind[row % kHistoryKinds][row / kHistoryKinds] =
      attributes.factor * __uint_as_float(largest);
}

struct StepAmaxes {
  const double* of_kind[kHistoryKinds];  // of the first matrix
  int64_t columns[kHistoryKinds];
  int64_t ranks;
};

__global__ void __launch_bounds__(kHistoryThreads)
    amax_history_update_kernel(StepAmaxes amaxes, const int32_t* skip, int64_t steps,
                               float* history) {
  if (*skip != 0) return;
  const auto row = static_cast<int>(blockIdx.x);
  const int kind = row % kHistoryKinds;
  const double* const part = amaxes.of_kind[kind] + row / kHistoryKinds;
  double largest = 0;
  for (int64_t rank = 0; rank < amaxes.ranks; ++rank) {
    largest = fmax(largest, part[rank * amaxes.columns[kind]]);
  }
  if (largest == 0 || isinf(largest)) return;
  float* const own = history + row * steps;
  // From the oldest on, as many at once as there are threads.
  for (int64_t end = steps; end > 0; end -= kHistoryThreads) {
    const int64_t i = end - 1 - static_cast<int64_t>(threadIdx.x);
    const float moved = i > 0 ? own[i - 1] : static_cast<float>(largest);
    __syncthreads();
    if (i >= 0) own[i] = moved;
    __syncthreads();
  }
}

void run_delayed_amax(const CudaKernelArguments& args) {
  const Shape& shape = args.input(0).shape;
  launch(args, {static_cast<unsigned>(shape[0] * kHistoryKinds), kHistoryThreads},
         delayed_amax_kernel, args.in<float>(0), shape[2],
         args.attributes->as<DelayedAmaxAttributes>(),
         DelayedAmaxOutputs{{args.out<float>(0), args.out<float>(1), args.out<float>(2)}});
}

void run_amax_history_update(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<AmaxHistoryAttributes>();
  const Shape& shape = args.input(0).shape;
  StepAmaxes amaxes{};
  amaxes.ranks = args.input(1).shape[0];
  for (int kind = 0; kind < kHistoryKinds; ++kind) {
    const int parts = kind == kHistoryKinds - 1 ? 2 : 1;
    amaxes.of_kind[kind] = args.in<double>(parts) + attributes.column[static_cast<size_t>(kind)];
    amaxes.columns[kind] = args.input(parts).shape[1];
  }
  launch(args, {static_cast<unsigned>(shape[0] * kHistoryKinds), kHistoryThreads},
         amax_history_update_kernel, amaxes, args.in<int32_t>(3), shape[2], args.out<float>(0));
}

}  // namespace

CudaKernel delayed_amax_cuda_kernel(const OpView&) {
  return &run_delayed_amax;
}

CudaKernel amax_history_update_cuda_kernel(const OpView&) {
  return &run_amax_history_update;
}

}  // namespace troupe
