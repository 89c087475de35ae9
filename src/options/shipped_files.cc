#include "options/shipped_files.h"

#include <algorithm>

namespace troupe {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> config_folders() {
  std::vector<fs::path> folders;
  std::error_code error;
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    const fs::path above = executable.parent_path().parent_path();
    folders.push_back(above / "share/troupe/configs");
    folders.push_back(above / "configs");
  }
#ifdef TROUPE_CONFIG_DIR
  folders.emplace_back(TROUPE_CONFIG_DIR);
#endif
  return folders;
}

}  // namespace

std::vector<fs::path> shipped_files(const std::string& folder, const std::string& extension) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const fs::path& configs : config_folders()) {
    for (const auto& entry : fs::directory_iterator(configs / folder, error)) {
      if (entry.path().extension() == extension) files.push_back(entry.path());
    }
    if (!files.empty()) break;
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace troupe
