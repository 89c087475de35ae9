#include "runtime/cuda_libraries.h"

#ifdef TROUPE_WITH_CUDA
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <nccl.h>
#include <nvrtc.h>
#endif

namespace troupe {

#ifdef TROUPE_WITH_CUDA

namespace {

// Versions are whole numbers with decimal places for each part.
std::string version_text(size_t version, size_t major_unit, size_t minor_unit) {
  return std::to_string(version / major_unit) + "." +
         std::to_string(version % major_unit / minor_unit) + "." +
         std::to_string(version % minor_unit);
}

}  // namespace

std::vector<std::pair<std::string, std::string>> cuda_library_versions() {
  int runtime = 0;
  int nccl = 0;
  int nvrtc_major = 0;
  int nvrtc_minor = 0;
  cudaRuntimeGetVersion(&runtime);
  ncclGetVersion(&nccl);
  nvrtcVersion(&nvrtc_major, &nvrtc_minor);
  return {{"cuda_runtime", version_text(static_cast<size_t>(runtime), 1000, 10)},
          {"nvrtc", std::to_string(nvrtc_major) + "." + std::to_string(nvrtc_minor)},
          {"cublaslt", version_text(cublasLtGetVersion(), 10000, 100)},
          {"cudnn", version_text(cudnnGetVersion(), 10000, 100)},
          {"nccl", version_text(static_cast<size_t>(nccl), 10000, 100)}};
}

#else

std::vector<std::pair<std::string, std::string>> cuda_library_versions() {
  return {};
}

#endif

}  // namespace troupe
