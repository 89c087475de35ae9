// What the kernels share: their operands, and the launch of each.
// Private to the operation.
#pragma once

#include "ops/attention/gated_delta_rule/cuda/delta_sm90.h"
#include "program/cuda/device.cuh"

namespace troupe {

// Eight numbers as they come from memory. Kept whole until they are needed: taking one apart waits
// for it, and then loads do not overlap.
inline constexpr int kDeltaPack = 8;
using DeltaPack = uint4;

__device__ __forceinline__ DeltaPack load_delta_pack(const Bf16* address) {
  return *reinterpret_cast<const DeltaPack*>(address);
}
__device__ __forceinline__ void store_delta_pack(Bf16* address, const DeltaPack& pack) {
  *reinterpret_cast<DeltaPack*>(address) = pack;
}
__device__ __forceinline__ void unpack(const DeltaPack& pack, float (&values)[kDeltaPack]) {
  const uint32_t pairs[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16);
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000U);
  }
}

// What a scan takes of a row, for one value head. Keys and queries are divided by their lengths
// here, so that products take them as they are.
struct alignas(16) DeltaNumbers {
  float beta;
  float from_start;  // e^G / |k|, 0 where a document begins in the chunk up to the row
  float to_end;      // e^{G_end - G} / |k|, 0 where one begins after it
  float query;       // e^G / (|q| sqrt(d_k)), 0 as from_start
};

// Operands of all kernels.
struct DeltaOperands {
  GatedDeltaRuleAttributes a;
  int parts = 1;  // of a state's columns, with kDeltaHead each: of gated_delta_state Q and P
  int64_t rows = 0;
  const Bf16* qkv = nullptr;
  const float* gates = nullptr;
  const int32_t* starts = nullptr;  // null: each is a sequence
  const float* initial = nullptr;   // [B, H_v, d_k, d_v]; null: zeros, of P the identity
  const float* d_ends = nullptr;    // [B, H_v, d_k, 2 d_v]: what reaches the last state, or null
  float* ends = nullptr;            // the same: the last state
  float* d_initial = nullptr;       // of the gradient alone, or null
  const Bf16* d_out = nullptr;      // the same
  Bf16* out = nullptr;              // of the forward pass alone
  Bf16* d_qkv = nullptr;
  float* d_gates = nullptr;
  // Scratch: of each chunk of each value head of each sequence.
  DeltaNumbers* numbers = nullptr;  // of each row
  float* decays = nullptr;          // e^{G_end}, 0 where a document begins; every fourth float
  Bf16* coupling = nullptr;         // C
  Bf16* attention = nullptr;        // A
  // Of the gradient alone.
  Bf16* u = nullptr;         // [parts, T, H_v, d_v]
  Bf16* du = nullptr;        // [parts, T, H_v, d_v]: dS_t^T k'_t
  Bf16* dv = nullptr;        // [T, H_v, d_v], of the second part
  Bf16* states = nullptr;    // [parts, B, H_v, chunks, d_v, d_k]: S before the chunk, transposed
  Bf16* d_states = nullptr;  // the same: E

  // Whether a sequence begins as a document does: what decays before its first row is zero, and so
  // is the gradient of that decay.
  __device__ bool from_zeros() const { return initial == nullptr && parts == 1; }
  __host__ __device__ int chunks() const { return (a.sequence + kDeltaChunk - 1) / kDeltaChunk; }
  // The number of a chunk of a sequence's value head, in scratch.
  __device__ int64_t chunk_of(int64_t sequence, int head, int chunk) const {
    return (sequence * a.value_heads + head) * chunks() + chunk;
  }
  // Its tile in `states`.
  __device__ int64_t state_of(int part, int64_t sequence, int head, int chunk) const {
    const int64_t of_part = part * (rows / a.sequence) * a.value_heads * chunks();
    return (of_part + chunk_of(sequence, head, chunk)) * a.state_size();
  }
  // Where a part begins in `u` and `du`.
  __device__ int64_t part_of(int part) const { return part * rows * a.value_size(); }
};

// C, A and the numbers of all chunks.
void launch_delta_couplings(const CudaKernelArguments& args, const DeltaOperands& operands);
// The gradients of queries, keys and gates.
void launch_delta_chunks(const CudaKernelArguments& args, const DeltaOperands& operands);

}  // namespace troupe
