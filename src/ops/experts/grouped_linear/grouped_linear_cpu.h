// The CPU kernels of this room.
#pragma once

#include "program/kernel.h"
#include "program/op_spec.h"

namespace troupe {

CpuKernel grouped_linear_cpu_kernel(const OpView& op);
CpuKernel grouped_linear_data_gradient_cpu_kernel(const OpView& op);
CpuKernel grouped_linear_weight_gradient_cpu_kernel(const OpView& op);

}  // namespace troupe
