// The files that are shipped with the program: shapes of models (configs/*.json) and kinds of GPUs
// (configs/gpus/*.toml).
//
// Pure functions of the file system; any thread.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace troupe {

// The files with this extension in a folder below configs, sorted; empty when there is no such
// folder beside the program.
std::vector<std::filesystem::path> shipped_files(const std::string& folder,
                                                 const std::string& extension);

}  // namespace troupe
