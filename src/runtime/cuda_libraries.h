// The libraries that the program uses on a GPU, with the versions that were found when it started.
// Needs no GPU. May be called from any thread.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace troupe {

// Name and version of each, e.g. {"cudnn", "9.19.0"}; empty in builds without CUDA.
std::vector<std::pair<std::string, std::string>> cuda_library_versions();

}  // namespace troupe
