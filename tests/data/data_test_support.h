// What the tests of the data room share: folders that clean up after themselves, whole-file reads
// and writes, and the message of an expected error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <span>
#include <stdlib.h>
#include <string>
#include <vector>

#include "base/error.h"
#include "data/indexed_dataset.h"

namespace troupe {

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "troupe_data_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "cannot create " << name;
    path_ = name;
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

  // Names of the files inside, sorted by nothing.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// Runs `body`, which must throw a UserError of this status, and returns its message.
template <class Body>
std::string message_of(ExitStatus status, const Body& body) {
  try {
    body();
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// One document per entry, one sequence each.
inline void write_dataset(const std::string& prefix,
                          const std::vector<std::vector<int32_t>>& documents) {
  IndexedDatasetWriter writer(prefix, TokenType::u16, false);
  for (const auto& document : documents) {
    writer.append(document);
    writer.end_sequence();
    writer.end_document();
  }
  writer.finish();
}

}  // namespace troupe
