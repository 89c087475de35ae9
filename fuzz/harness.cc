#include "harness.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/error.h"

namespace troupe::fuzz {
namespace {

// No message needs more: names from files are quoted at a limited length.
constexpr size_t kLongestMessage = 4000;

class ScratchFolder {
 public:
  ScratchFolder() : path_("/dev/shm/troupe_fuzz_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) report_finding("cannot create " + path_);
  }
  ~ScratchFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void check_message(std::string_view message) {
  if (message.empty()) report_finding("a UserError without a message");
  if (message.size() > kLongestMessage) {
    report_finding("a message of " + std::to_string(message.size()) +
                   " bytes: " + std::string(message.substr(0, 1000)));
  }
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      report_finding("a message with the control character " + std::to_string(byte) + ": " +
                     std::string(message));
    }
  }
}

void write_seeds(const std::string& folder) {
  std::filesystem::create_directories(folder);
  size_t number = 0;
  for (const std::string& seed : seeds()) {
    std::ofstream(folder + "/seed_" + std::to_string(number++), std::ios::binary) << seed;
  }
}

}  // namespace

const std::string& scratch_folder() {
  static const ScratchFolder folder;
  return folder.path();
}

std::string put_file(std::string_view name, std::string_view contents) {
  std::string path = scratch_folder() + "/" + std::string(name);
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr ||
      std::fwrite(contents.data(), 1, contents.size(), file) != contents.size() ||
      std::fclose(file) != 0) {
    report_finding("cannot write " + path);
  }
  return path;
}

std::string read_source_file(std::string_view path_in_tree) {
  const std::string path = std::string(TROUPE_SOURCE_DIR "/") + std::string(path_in_tree);
  std::ifstream in(path, std::ios::binary);
  if (!in) report_finding("cannot read " + path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void report_finding(const std::string& message) {
  std::fprintf(stderr, "fuzz: %s\n", message.c_str());
  std::abort();
}

}  // namespace troupe::fuzz

// libFuzzer's entry points. `TARGET --write-seeds FOLDER` writes the seeds and does nothing else.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::string_view((*argv)[1]) == "--write-seeds") {
    troupe::fuzz::write_seeds((*argv)[2]);
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    troupe::fuzz::parse({reinterpret_cast<const char*>(data), size});
  } catch (const troupe::UserError& error) {
    troupe::fuzz::check_message(error.what());
  }
  return 0;
}
