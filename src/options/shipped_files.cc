#include "options/shipped_files.h"

#include <algorithm>

#include "base/machine.h"

namespace troupe {
namespace {

namespace fs = std::filesystem;

// Beside the program, in build trees as in installed ones.
fs::path config_folder() {
  return program_file().parent_path().parent_path() / "share/troupe/configs";
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
