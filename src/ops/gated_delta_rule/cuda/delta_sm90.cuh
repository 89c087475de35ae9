// What the scans and the chunks' kernel share: places of a head's rows, and the launch of each.
// Private to the operation.
#pragma once

#include "ops/cuda/device.cuh"
#include "ops/gated_delta_rule/cuda/delta_sm90.h"

namespace troupe {

// Operands of the scans and of the chunks' kernel.
struct DeltaOperands {
  GatedDeltaRuleAttributes a;
  int64_t rows = 0;
  const Bf16* qkv = nullptr;
  const float* gates = nullptr;
  const int32_t* starts = nullptr;  // null: a document is a sequence
  const Bf16* d_out = nullptr;      // of the gradient alone
  Bf16* out = nullptr;              // of the forward pass alone
  Bf16* d_qkv = nullptr;
  float* d_gates = nullptr;
  // The gradient's scratch, each null in the forward pass.
  Bf16* u = nullptr;         // [T, H_v, d_v]
  Bf16* du = nullptr;        // [T, H_v, d_v]: dS_t^T k'_t
  Bf16* states = nullptr;    // [B, H_v, chunks, d_v, d_k]: S before the chunk, transposed
  Bf16* d_states = nullptr;  // the same: what reaches the state after the chunk

  __host__ __device__ int chunks() const { return (a.sequence + kDeltaChunk - 1) / kDeltaChunk; }
  __device__ bool begins_document(int64_t row) const {
    const int64_t t = row % a.sequence;
    return t == (starts == nullptr ? 0 : starts[row]);
  }
  // Of a sequence's value head, the tile of a chunk in `states`.
  __device__ int64_t state_of(int64_t sequence, int head, int chunk) const {
    return ((sequence * a.value_heads + head) * chunks() + chunk) * a.state_size();
  }
};

void launch_delta_chunks(const CudaKernelArguments& args, const DeltaOperands& operands);

}  // namespace troupe
