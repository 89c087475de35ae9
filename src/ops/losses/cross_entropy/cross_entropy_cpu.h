// The CPU kernels of this room.
#pragma once

#include "program/kernel.h"
#include "program/op_spec.h"

namespace troupe {

CpuKernel cross_entropy_cpu_kernel(const OpView& op);
CpuKernel cross_entropy_gradient_cpu_kernel(const OpView& op);
CpuKernel cross_entropy_part_cpu_kernel(const OpView& op);
CpuKernel cross_entropy_of_parts_cpu_kernel(const OpView& op);

}  // namespace troupe
