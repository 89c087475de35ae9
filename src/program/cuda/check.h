// What happens when CUDA says no. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>
#include <string>

#include "base/error.h"

namespace troupe {

// Throws UserError (failed) unless `error` is success: the GPU has failed, or was asked for what it
// cannot do. `what` says what was being done ("copying to the GPU").
inline void check_cuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  throw_failed("CUDA: " + what + " failed: " + cudaGetErrorString(error) + " (" +
               cudaGetErrorName(error) + ").");
}

}  // namespace troupe
