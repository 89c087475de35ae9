// The CPU kernels of this room, and their memory.
#pragma once

#include "ops/attention/context_attention/context_attention.h"
#include "program/kernel.h"

namespace troupe {

CpuKernel context_attention_cpu_kernel(const OpView& op);
CpuKernel context_attention_gradient_cpu_kernel(const OpView& op);
CpuKernel ring_attention_cpu_kernel(const OpView& op);
CpuKernel ring_attention_gradient_cpu_kernel(const OpView& op);

// `dtype`: of q.
uint64_t context_attention_scratch_bytes(const ContextAttentionAttributes& attributes, DType dtype);
uint64_t context_attention_gradient_scratch_bytes(const ContextAttentionAttributes& attributes,
                                                  DType dtype);
uint64_t context_attention_workspace_bytes(const ContextAttentionAttributes& attributes,
                                           DType dtype, bool ring);
uint64_t context_attention_gradient_workspace_bytes(const ContextAttentionAttributes& attributes,
                                                    DType dtype, bool ring);

}  // namespace troupe
