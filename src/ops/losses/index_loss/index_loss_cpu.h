// The CPU kernels of this folder and their private memory. `most`: keys of a query.
#pragma once

#include "ops/losses/index_loss/index_loss.h"

namespace troupe {

CpuKernel index_loss_cpu_kernel(const OpView& op);
CpuKernel index_loss_gradient_cpu_kernel(const OpView& op);

uint64_t index_loss_scratch_bytes(const IndexAttributes& index, int64_t most, DType dtype);
uint64_t index_loss_workspace_bytes(const IndexAttributes& index, DType dtype);
uint64_t index_loss_gradient_scratch_bytes(const IndexAttributes& index, int64_t most, DType dtype);
uint64_t index_loss_gradient_workspace_bytes(const IndexAttributes& index, DType dtype);

}  // namespace troupe
