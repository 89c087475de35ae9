// Loops over tokens of the kernels that read a router's logits [T, E], f32 or f64: a warp for each
// token. The counterpart of ops/losses/router_loss/router_loss_cpu.h and ops/cpu/router_scores.h.
#pragma once

#include "ops/routing/router_topk/score_function.h"
#include "program/cuda/device.cuh"
#include "program/program.h"

namespace troupe {

inline constexpr int kTokensPerBlock = 8;  // warps

inline unsigned token_blocks(int64_t tokens) {
  return static_cast<unsigned>(ceil_divide(tokens, kTokensPerBlock));
}

// sqrt(log(1 + e^z)), written so that e^z cannot overflow; and the derivatives of the scores.
template <class T>
__device__ __forceinline__ T device_sqrtsoftplus(T z) {
  return sqrt((z > T(0) ? z : T(0)) + log1p(exp(-fabs(z))));
}
template <class T>
__device__ __forceinline__ T device_score(ScoreFunction function, T z) {
  return function == ScoreFunction::sigmoid ? sigmoid(z) : device_sqrtsoftplus(z);
}
template <class T>
__device__ __forceinline__ T device_score_slope(ScoreFunction function, T z, T score) {
  if (function == ScoreFunction::sigmoid) return score * (T(1) - score);
  return score > T(0) ? sigmoid(z) / (T(2) * score) : T(0);
}

// The logits of one token, seen by all lanes of a warp.
template <class T>
struct TokenLogits {
  const T* z;
  int experts;
  int lane;

  // Sum over the experts of term(i).
  template <class Term>
  __device__ T sum(const Term& term) const {
    T total = 0;
    for (int i = lane; i < experts; i += 32) total += term(i);
    return warp_sum(total);
  }
  __device__ T largest() const {
    T value = -infinity<T>();
    for (int i = lane; i < experts; i += 32) value = z[i] > value ? z[i] : value;
    return warp_max(value);
  }
};

// The tokens that count: TokenMask of ops/losses/router_loss/router_loss_cpu.h.
struct DeviceTokenMask {
  const int32_t* mask = nullptr;  // null: all count
  const int32_t* count = nullptr;

  DeviceTokenMask(const CudaKernelArguments& args, size_t input) {
    if (input + 1 >= args.inputs.size()) return;
    mask = args.in<int32_t>(static_cast<int>(input));
    count = args.in<int32_t>(static_cast<int>(input) + 1);
  }
  __device__ bool counts(int64_t token) const { return mask == nullptr || mask[token] != 0; }
};

template <class T, class Term>
__global__ void token_terms_kernel(Term term, DeviceTokenMask valid, const T* logits,
                                   int64_t tokens, int experts, double* terms) {
  const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / 32;
  if (token >= tokens) return;
  const TokenLogits<T> own{logits + token * experts, experts, static_cast<int>(threadIdx.x) % 32};
  const double value = valid.counts(token) ? term(token, own) : 0.0;
  if (own.lane == 0) terms[token] = value;
}

template <class T>
__global__ void sum_terms_kernel(const double* terms, int64_t tokens, double factor,
                                 const int32_t* divisor, T* out) {
  __shared__ double shared[32];
  double sum = 0;
  for_row(tokens, [&](int64_t i) { sum += terms[i]; });
  sum = block_sum(sum, shared);
  if (divisor != nullptr) factor /= fmax(1.0, static_cast<double>(*divisor));
  if (threadIdx.x == 0) *out = static_cast<T>(factor * sum);
}

// Output 0 = factor times the sum over the tokens that count of term(token, logits), in double,
// over max(*divisor, 1) unless that is null. The scratch memory holds a double for each token
// (router_loss_cuda_scratch_bytes).
template <class T, class Term>
void sum_over_tokens(const CudaKernelArguments& args, double factor, const DeviceTokenMask& valid,
                     const int32_t* divisor, const Term& term) {
  const Shape& shape = args.input(0).shape;
  auto* terms = reinterpret_cast<double*>(args.scratch);
  launch(args, {token_blocks(shape[0]), 32 * kTokensPerBlock}, token_terms_kernel<T, Term>, term,
         valid, args.in<T>(0), shape[0], static_cast<int>(shape[1]), terms);
  launch(args, {1, 1024}, sum_terms_kernel<T>, terms, shape[0], factor, divisor, args.out<T>(0));
}

template <class T, class Body>
__global__ void token_gradients_kernel(Body body, DeviceTokenMask valid, const T* logits,
                                       int64_t tokens, int experts, T* d_logits) {
  const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / 32;
  if (token >= tokens) return;
  const TokenLogits<T> own{logits + token * experts, experts, static_cast<int>(threadIdx.x) % 32};
  T* const d_own = d_logits + token * experts;
  if (valid.counts(token)) {
    body(token, own, d_own);
  } else {
    for (int i = own.lane; i < experts; i += 32) d_own[i] = T(0);
  }
}

// Calls body(token, logits, d_logits of the token) with every warp's lanes for the tokens that
// count. The gradient of others is 0.
template <class T, class Body>
void for_each_token(const CudaKernelArguments& args, const DeviceTokenMask& valid,
                    const Body& body) {
  const Shape& shape = args.input(0).shape;
  launch(args, {token_blocks(shape[0]), 32 * kTokensPerBlock}, token_gradients_kernel<T, Body>,
         body, valid, args.in<T>(0), shape[0], static_cast<int>(shape[1]), args.out<T>(0));
}

}  // namespace troupe
