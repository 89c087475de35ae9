#include "options/shipped_files.h"

#include <algorithm>

namespace troupe {
namespace {

namespace fs = std::filesystem;

// Beside the program, in build trees as in installed ones.
fs::path config_folder() {
  std::error_code error;
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  return executable.parent_path().parent_path() / "share/troupe/configs";
}

}  // namespace

std::vector<fs::path> shipped_files(const std::string& folder, const std::string& extension) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(config_folder() / folder, error)) {
    if (entry.path().extension() == extension) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace troupe
