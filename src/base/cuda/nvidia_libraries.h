// NVIDIA's libraries (cuBLASLt, cuDNN, NCCL, NVRTC, CUPTI), which are loaded when a GPU is first
// used: so one program runs on machines with them and without.
//
// Their functions are called by their own names. Each name is a jump to where
// load_nvidia_libraries() found the function; a call before that ends the program. The libraries
// are looked for as the linker would: in LD_LIBRARY_PATH, in the folders that the build gave the
// program (cmake/TroupeInstall.cmake), in the system.
#pragma once

#include <string>

namespace troupe {

// Loads them, once for the process, and says which are missing and what brings them; empty: none.
// Without those needed nothing of them may be called. Any thread.
const std::string& load_nvidia_libraries();

}  // namespace troupe
