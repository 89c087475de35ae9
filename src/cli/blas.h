// Which BLAS the CPU kernels call, as OpenBLAS says it of itself. Other libraries say nothing: the
// texts are empty then. Any thread.
#pragma once

#include <string>
#include <string_view>

namespace troupe {

// Name and version: "OpenBLAS 0.3.21".
std::string blas_library();

// The processor that its kernels are for: "SkylakeX".
std::string blas_processor();

// The processor of OpenBLAS's kernels for a level of CPU kernels (ops/kernel_level.h); empty: none
// is chosen for it.
std::string blas_processor_for(std::string_view level);

}  // namespace troupe
