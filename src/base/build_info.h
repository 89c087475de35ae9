// How this program was built: what `troupe --version` and `troupe doctor` say of it. The build
// defines it (CMakeLists.txt). Any thread.
#pragma once

#include <string_view>

namespace troupe {

// Name and version: "GNU 12.2.0".
std::string_view build_compiler();

// The processor that it was compiled for, as -march takes it: "native", "x86-64-v3"; empty: any of
// the architecture.
std::string_view build_processor();

// The version of CUDA's compiler; empty in builds without CUDA.
std::string_view build_cuda();

}  // namespace troupe
