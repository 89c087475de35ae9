// Which BLAS the CPU kernels call, as OpenBLAS says it of itself. Other libraries say nothing: the
// texts are empty then. Any thread.
#pragma once

#include <string>

namespace troupe {

// Name and version: "OpenBLAS 0.3.21".
std::string blas_library();

// The processor that its kernels are for: "SkylakeX".
std::string blas_processor();

}  // namespace troupe
