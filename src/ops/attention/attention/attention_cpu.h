// The CPU kernels of this room, and their memory.
#pragma once

#include "ops/attention/attention/attention.h"
#include "program/kernel.h"
#include "program/op_spec.h"

namespace troupe {

CpuKernel attention_cpu_kernel(const OpView& op);
CpuKernel attention_gradient_cpu_kernel(const OpView& op);

// `dtype`: of q and kv.
uint64_t attention_scratch_bytes(const AttentionAttributes& attributes, DType dtype);
uint64_t attention_gradient_scratch_bytes(const AttentionAttributes& attributes, DType dtype);
uint64_t attention_gradient_workspace_bytes(const AttentionAttributes& attributes, DType dtype);

}  // namespace troupe
