// Warnings of operations that a GPU does with plain kernels: which operations, which kernel, why,
// and what to change.
//
// Any thread.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/device.h"
#include "plan/kernel_variants.h"

namespace troupe {

// "Warning: ..." for each reason and kernel; none where all operations have the kernels that are
// fast on this GPU.
std::vector<std::string> warn_of_slow_kernels(std::span<const KernelVariant> variants,
                                              const DeviceTraits& gpu);

// The same of a program on a rank's device.
std::vector<std::string> warn_of_slow_kernels(const Program& program, Device device, int gpu);

}  // namespace troupe
