// The gated delta rule on Hopper, for bf16 and heads of 128 elements. Private to the operation.
//
// Rows go in chunks of kDeltaChunk. Within one, all u follow from the state before it by products
// of matrices: with K the chunk's normed keys, G_t the sum of g over its rows up to t, L the
// coupling of its rows, L[t, i] = e^{G_t - G_i} k'_t . k'_i for i < t, and b = diag(beta),
//
//   R = V - e^G K S                u = (1 + L b)^-1 R = R - C b R      C = (1 + L b)^-1 L
//   S after it = e^{G_end} S + (e^{G_end - G} K)^T b u
//   O = e^G Q S + A b u            A[t, i] = e^{G_t - G_i} q'_t . k'_i for i <= t
//
// and backwards, with E what reaches the state after the chunk and du_t = dS_t^T k'_t,
//
//   N = e^{G_end - G} K E + A^T dO             du = N - C^T b N        dv = b du
//   E before it = e^{G_end} E + (e^G Q)^T dO - (e^G K)^T dv
//
// C and A of all chunks are made at once. Then a scan goes over the chunks, of which each block has
// some columns of the state (elements of the value), which do not depend on one another. The
// gradient has two scans, one forward for u and the states before each chunk, one backward for du,
// dv and E after each chunk; then, for all chunks at once, the gradients of queries, keys and gates
// are made of these. Scans begin from the state that is given, or from what reaches the last one,
// and give what they end in. Those of gated_delta_state have P as a second part of the state,
// beside Q, with values of zero.
//
// Products are of bf16 on tensor cores, summed in fp32; states between chunks are fp32.
// Deterministic; no allocation, no synchronisation with the host.
#pragma once

#include <cstdint>

#include "ops/attention/gated_delta_rule/delta_attributes.h"
#include "program/cuda_kernel.h"

namespace troupe {

inline constexpr int kDeltaHead = 128;  // d_k and d_v
inline constexpr int kDeltaChunk = 64;

// Are there kernels for operands of this dtype?
constexpr bool has_delta_sm90(DType dtype, const GatedDeltaRuleAttributes& a) {
  return dtype == DType::bf16 && a.key_dim == kDeltaHead && a.value_dim == kDeltaHead;
}

// Chunks of all sequences and value heads.
constexpr int64_t delta_sm90_chunks(int64_t rows, const GatedDeltaRuleAttributes& a) {
  return rows / a.sequence * ((a.sequence + int64_t{kDeltaChunk} - 1) / kDeltaChunk) *
         a.value_heads;
}

// Bytes of scratch for `rows` rows: of each chunk C and A in bf16, and of each of its rows, and of
// itself, a few numbers (DeltaOperands).
constexpr int64_t delta_sm90_scratch(int64_t rows, const GatedDeltaRuleAttributes& a) {
  return delta_sm90_chunks(rows, a) *
         (2 * 2 * kDeltaChunk * kDeltaChunk + (4 * kDeltaChunk + 4) * 4);
}

// Of the gradient also u and du of every row, S and E of every chunk, in bf16, and dv of the second
// of two parts.
constexpr int64_t delta_sm90_gradient_scratch(int64_t rows, const GatedDeltaRuleAttributes& a,
                                              int parts) {
  return delta_sm90_scratch(rows, a) +
         2 * ((3 * parts - 1) * rows * a.value_size() +
              2 * parts * delta_sm90_chunks(rows, a) * a.state_size());
}

// gated_delta_rule, gated_delta_state and their gradients.
void delta_rule_sm90(const CudaKernelArguments& args);
void delta_rule_gradient_sm90(const CudaKernelArguments& args);
void delta_state_sm90(const CudaKernelArguments& args);
void delta_state_gradient_sm90(const CudaKernelArguments& args);

}  // namespace troupe
