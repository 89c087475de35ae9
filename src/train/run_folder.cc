#include "train/run_folder.h"

#include <cctype>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fmt/format.h>
#include <sys/stat.h>

#include "base/error.h"
#include "io/file.h"

namespace troupe {
namespace {

constexpr int kMostOfASecond = 1000;

// What --model names, as part of a file name: of a path, its last part without .json.
std::string model_name(const std::string& model) {
  namespace fs = std::filesystem;
  fs::path path = fs::path(model).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  if (path.filename() == "config.json") path = path.parent_path();
  if (path.extension() == ".json") path.replace_extension();
  std::string name = path.filename().string();
  for (char& letter : name) {
    const auto byte = static_cast<unsigned char>(letter);
    if (std::isalnum(byte) == 0 && letter != '.' && letter != '_') letter = '-';
  }
  return name.empty() || name == "." || name == ".." ? "model" : name;
}

// The local time as decimal digits: 20261122214012.
uint64_t digits_of_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  uint64_t digits = static_cast<uint64_t>(parts.tm_year) + 1900;
  for (const int part :
       {parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec}) {
    digits = digits * 100 + static_cast<uint64_t>(part);
  }
  return digits;
}

// The `number`-th run of that model that began in that second.
std::string folder_name(const std::string& model, uint64_t digits, uint64_t number) {
  return fmt::format("runs/{}-{}-{:06}{}", model, digits / 1000000, digits % 1000000,
                     number > 1 ? fmt::format("-{}", number) : "");
}

}  // namespace

std::string make_run_folder(const std::string& model, ProcessGroup* processes) {
  const int32_t rank = processes == nullptr ? 0 : processes->own_ranks().front();
  const std::string name = model_name(model);
  uint64_t digits = digits_of_now();
  uint64_t number = 1;
  if (rank == 0) {
    Disk().make_directories("runs");
    while (::mkdir(folder_name(name, digits, number).c_str(), 0777) != 0) {
      if (errno != EEXIST || ++number > kMostOfASecond) {
        throw_failed(fmt::format(
            "Cannot make the folder {} for the run: {}. Say where to save with --save DIR, or "
            "--no-save.",
            folder_name(name, digits, number), std::strerror(errno)));
      }
    }
  }
  if (processes != nullptr) {
    digits = processes->exchange(rank, digits).front();
    number = processes->exchange(rank, number).front();
  }
  return folder_name(name, digits, number);
}

void remove_if_empty(const std::string& folder) {
  std::error_code error;  // not empty: it stays
  std::filesystem::remove(folder, error);
}

}  // namespace troupe
