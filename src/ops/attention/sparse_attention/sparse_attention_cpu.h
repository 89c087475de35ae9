// The CPU kernels of this folder and their memory.
#pragma once

#include "ops/attention/sparse_attention/sparse_attention.h"

namespace troupe {

CpuKernel sparse_attention_cpu_kernel(const OpView& op);
CpuKernel sparse_attention_gradient_cpu_kernel(const OpView& op);

// `most`: keys of a query, K.
uint64_t sparse_attention_scratch_bytes(const SparseAttentionAttributes& attributes, int64_t most,
                                        DType dtype);
uint64_t sparse_attention_gradient_scratch_bytes(const SparseAttentionAttributes& attributes,
                                                 int64_t most, DType dtype);
uint64_t sparse_attention_gradient_workspace_bytes(const SparseAttentionAttributes& attributes,
                                                   DType dtype);

}  // namespace troupe
