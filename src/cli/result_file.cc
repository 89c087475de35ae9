#include "cli/result_file.h"

#include <filesystem>
#include <fmt/format.h>
#include <fstream>

#include "base/error.h"
#include "base/text.h"
#include "io/file.h"

namespace troupe {

void check_result_file(const ResultKind& kind, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  const auto refuse = [&](const std::string& why) {
    throw_bad_request(fmt::format("{} {}: {}", kind.flag, printable(path), why));
  };
  if (!path.ends_with(".toml")) refuse("the name of a result ends with .toml.");
  const fs::path folder = fs::path(path).parent_path();
  std::error_code error;
  if (!folder.empty() && !fs::is_directory(folder, error)) refuse("there is no such folder.");
  if (!fs::exists(path, error)) return;
  std::string begin(kind.heading.size(), '\0');
  std::ifstream(path).read(begin.data(), static_cast<std::streamsize>(begin.size()));
  if (begin != kind.heading) {
    refuse(fmt::format("the file is there, and no {}. Choose another name.", kind.name));
  }
}

void write_result_file(const std::string& path, const std::string& text) {
  const Disk disk;
  const std::string temporary = path + ".tmp";
  disk.write_file(temporary, text);
  disk.rename(temporary, path);
}

}  // namespace troupe
