// The libraries that the program uses on a GPU, with the versions that were found: the first call
// loads them (base/cuda/nvidia_libraries.h). Needs no GPU. May be called from any thread.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace troupe {

// Name and version of each, e.g. {"cudnn", "9.19.0"}; empty in builds without CUDA,
// and where one is missing.
std::vector<std::pair<std::string, std::string>> cuda_library_versions();

// Why one of them must not be used, and what to do; empty if all can be, and in builds without
// CUDA.
std::string cuda_library_problem();

// The same of one version of cuDNN, which is counted as cudnnGetVersion() does: 91501 is 9.15.1.
// Older ones write outside their memory in the backward pass of attention where a replayed CUDA
// graph contains it and the number of keys is no multiple of 128 (release notes of cudnn-frontend
// 1.16.0; tests/layout/gpus_gpu_test.cc shows it with cuDNN 9.14).
std::string cudnn_problem(size_t version);

}  // namespace troupe
