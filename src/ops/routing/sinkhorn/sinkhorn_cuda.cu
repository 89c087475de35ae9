#include <algorithm>

#include "ops/cuda/router_tokens.cuh"
#include "ops/cuda/topk.cuh"
#include "ops/routing/sinkhorn/sinkhorn.h"
#include "ops/routing/sinkhorn/sinkhorn_cuda.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr double kSinkhornEpsilon = 1e-8;
constexpr double kSinkhornTolerance = 1e-4;

template <class T>
__global__ void scale_rows_kernel(const T* logits, int64_t tokens, int experts, Balance balance) {
  const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / 32;
  if (token >= tokens) return;
  const TokenLogits<T> own{logits + token * experts, experts, static_cast<int>(threadIdx.x) % 32};
  const auto largest = static_cast<double>(own.largest());
  const bool finite = isfinite(largest);
  for (int i = own.lane; i < experts; i += 32) {
    balance.scaled[token * experts + i] =
        finite ? exp(score_or_none(static_cast<double>(own.z[i])) - largest) : 0.0;
  }
  if (own.lane == 0) {
    balance.epsilon[token] = finite ? kSinkhornEpsilon * exp(-largest) : kSinkhornEpsilon;
  }
}

// One block does all rounds: they end when the change is small, which only they know.
__global__ void balance_kernel(int64_t tokens, int experts, int slices, Balance balance) {
  __shared__ double shared[32];
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < experts; i += kBalanceThreads) balance.d1[i] = 1;
  __syncthreads();
  for (int round = 0; round < kSinkhornRounds; ++round) {
    for (int64_t token = thread / 32; token < tokens; token += kBalanceThreads / 32) {
      double asked = 0;
      for (int i = thread % 32; i < experts; i += 32) {
        asked += balance.scaled[token * experts + i] * balance.d1[i];
      }
      asked = warp_sum(asked) + balance.epsilon[token];
      if (thread % 32 == 0) balance.d0[token] = 1 / (static_cast<double>(tokens) * asked);
    }
    __syncthreads();
    for (int i = thread; i < experts * slices; i += kBalanceThreads) {
      double sum = 0;
      for (int64_t token = i / experts; token < tokens; token += slices) {
        sum += balance.scaled[token * experts + i % experts] * balance.d0[token];
      }
      balance.partial[i] = sum;
    }
    __syncthreads();
    double change = 0;
    for (int i = thread; i < experts; i += kBalanceThreads) {
      double total = kSinkhornEpsilon;
      for (int slice = 0; slice < slices; ++slice) total += balance.partial[slice * experts + i];
      const double d1 = 1 / (static_cast<double>(experts) * total);
      change += fabs(d1 - balance.d1[i]);
      balance.d1[i] = d1;
    }
    // Also the barrier after which d1 is complete.
    change = block_sum(change, shared) / static_cast<double>(experts);
    __syncthreads();
    if (change <= kSinkhornTolerance) break;
  }
}

// As on the CPU: z + log d1 keeps the order and neither overflows nor underflows.
template <class T>
__global__ void select_balanced_kernel(const T* logits, int32_t* indices, int64_t tokens,
                                       int experts, int top_k, Balance balance) {
  const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / 32;
  if (token >= tokens) return;
  double* scores = balance.scaled + token * experts;  // not needed any more
  for (int i = static_cast<int>(threadIdx.x) % 32; i < experts; i += 32) {
    scores[i] =
        score_or_none(static_cast<double>(logits[token * experts + i]) + log(balance.d1[i]));
  }
  __syncwarp();
  take_largest(scores, experts, top_k, indices + token * top_k);
}

template <class T>
void run_sinkhorn_topk(const CudaKernelArguments& args) {
  const Shape& shape = args.input(0).shape;
  const int experts = static_cast<int>(shape[1]);
  const Balance balance(args.scratch, shape[0], shape[1]);
  const Launch by_token{token_blocks(shape[0]), 32 * kTokensPerBlock};
  launch(args, by_token, scale_rows_kernel<T>, args.in<T>(0), shape[0], experts, balance);
  launch(args, {1, kBalanceThreads}, balance_kernel, shape[0], experts,
         static_cast<int>(Balance::slices(shape[1])), balance);
  launch(args, by_token, select_balanced_kernel<T>, args.in<T>(0), args.out<int32_t>(0), shape[0],
         experts, args.attributes->as<SinkhornTopkAttributes>().top_k, balance);
}

}  // namespace

CudaKernel sinkhorn_topk_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_sinkhorn_topk<double> : &run_sinkhorn_topk<float>;
}

}  // namespace troupe
