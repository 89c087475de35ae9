// The gated delta rule on Hopper, for bf16 and heads of 128 elements. Private to the operation.
//
// The state's columns (elements of the value) do not depend on one another. So a scan over the rows
// keeps a few columns in registers, in fp32, with eight lanes for each: many more columns than
// multiprocessors, and no product waits for a whole matrix. The gradient is two such scans, one
// forward for u and the states before each chunk of kDeltaChunk rows, one backward for du = dS^T k
// and the dS after each chunk, and then, for all chunks at once, products of tiles on tensor cores
// that make the gradients of queries, keys and gates of them.
//
// Deterministic; no allocation, no synchronisation with the host.
#pragma once

#include <cstdint>

#include "ops/gated_delta_rule/gated_delta_rule.h"
#include "program/cuda_kernel.h"

namespace troupe {

inline constexpr int kDeltaHead = 128;  // d_k and d_v
inline constexpr int kDeltaChunk = 64;

// Are there kernels for operands of this dtype?
constexpr bool has_delta_sm90(DType dtype, const GatedDeltaRuleAttributes& a) {
  return dtype == DType::bf16 && a.key_dim == kDeltaHead && a.value_dim == kDeltaHead;
}

// Bytes of scratch of the gradient of `rows` rows: u and du of every row, S and dS of every chunk,
// all in bf16.
constexpr int64_t delta_sm90_scratch(int64_t rows, const GatedDeltaRuleAttributes& a) {
  const int64_t chunks =
      rows / a.sequence * ((a.sequence + int64_t{kDeltaChunk} - 1) / kDeltaChunk) * a.value_heads;
  return 2 * (2 * rows * a.value_size() + 2 * chunks * a.state_size());
}

// gated_delta_rule and gated_delta_rule_gradient.
void delta_rule_sm90(const CudaKernelArguments& args);
void delta_rule_gradient_sm90(const CudaKernelArguments& args);

}  // namespace troupe
