#include "runtime/cuda_libraries.h"

#ifdef TROUPE_WITH_CUDA
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <nccl.h>
#include <nvrtc.h>

#include "base/cuda/nvidia_libraries.h"
#endif

namespace troupe {
namespace {

// Versions are whole numbers with decimal places for each part.
std::string version_text(size_t version, size_t major_unit, size_t minor_unit) {
  return std::to_string(version / major_unit) + "." +
         std::to_string(version % major_unit / minor_unit) + "." +
         std::to_string(version % minor_unit);
}

std::string cudnn_version_text(size_t version) {
  return version_text(version, 10000, 100);
}

}  // namespace

std::string cudnn_problem(size_t version) {
  constexpr size_t kOldest = 91501;
  if (version >= kOldest) return {};
  return "cuDNN " + cudnn_version_text(version) +
         " writes outside its memory where steps are CUDA graphs. Install " +
         cudnn_version_text(kOldest) +
         " or newer; if the build has found one, take the folder of the old one out of "
         "LD_LIBRARY_PATH";
}

#ifdef TROUPE_WITH_CUDA

std::vector<std::pair<std::string, std::string>> cuda_library_versions() {
  if (!load_nvidia_libraries().empty()) return {};
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
          {"cudnn", cudnn_version_text(cudnnGetVersion())},
          {"nccl", version_text(static_cast<size_t>(nccl), 10000, 100)}};
}

std::string cuda_library_problem() {
  const std::string& problem = load_nvidia_libraries();
  return problem.empty() ? cudnn_problem(cudnnGetVersion()) : problem;
}

#else

std::vector<std::pair<std::string, std::string>> cuda_library_versions() {
  return {};
}

std::string cuda_library_problem() {
  return {};
}

#endif

}  // namespace troupe
