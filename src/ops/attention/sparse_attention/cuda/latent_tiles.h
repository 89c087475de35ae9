// Sparse attention on tensor cores, of bf16 keys of 576 elements whose first 512 are the values:
// the latent and the turning part of DeepSeek's models.
//
// A block has a query and 64 of its heads; it goes through the query's keys 64 at a time, gathered
// into shared memory. Gradients of keys are summed by blocks that each go through some queries of a
// sequence, in sums of their own for all of its keys, which are then added in order: no atomics,
// and memory for them, as much as kMostLatentSumBytes.
//
// The arithmetic that kernels and the rules of their memory share. Pure functions; any thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/device.h"
#include "base/dtype.h"
#include "ops/attention/sparse_attention/key_positions.h"
#include "program/cuda_kernel.h"
#include "program/program.h"

namespace troupe {

inline constexpr int kLatentKeyDim = 576;
inline constexpr int kLatentValueDim = 512;
inline constexpr uint64_t kMostLatentSumBytes = uint64_t{1} << 30;
inline constexpr int64_t kLatentSumBlocks = 132;  // of all sequences together, at most

// Blocks that go through the queries of a sequence.
inline int64_t latent_sum_blocks(const KeyRows& rows) {
  const auto bytes = static_cast<int64_t>(kMostLatentSumBytes / sizeof(float)) /
                     (rows.batch * rows.sequence() * kLatentKeyDim);
  const int64_t most = (kLatentSumBlocks + rows.batch - 1) / rows.batch;
  return std::clamp<int64_t>(std::min<int64_t>(bytes, rows.rows), 1, most);
}

inline uint64_t latent_sum_bytes(const KeyRows& rows) {
  return static_cast<uint64_t>(rows.batch * latent_sum_blocks(rows) * rows.sequence() *
                               kLatentKeyDim) *
         sizeof(float);
}

// Only in builds with CUDA.
CudaKernel sparse_attention_latent_kernel(const OpView& op);
CudaKernel sparse_attention_latent_gradient_kernel(const OpView& op);

}  // namespace troupe
