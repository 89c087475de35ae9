// Warnings of operations that a GPU does with plain kernels: which operations, which kernel, why,
// and what to change.
//
// Which kernels those are is known before a run, except of products by cuBLASLt: it says only on
// the GPU that it has no algorithm for their sizes.
//
// Any thread.
#pragma once

#include <cstdint>
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

// Of Interpreter::operations_without_algorithm(), by their kinds; empty where there are none.
std::string warn_of_missing_algorithms(const Program& program, std::span<const int32_t> operations);

}  // namespace troupe
