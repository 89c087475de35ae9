// What the tests of the io room share: folders that clean up after themselves, whole files, and the
// message of an expected error.
#pragma once

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <stdlib.h>
#include <string>
#include <unistd.h>

#include "base/error.h"

namespace troupe::io_test {

// A new folder, in memory where the system offers that: these tests make thousands of files
// durable, and losing power is part of the tests, not left to the disk.
class TempFolder {
 public:
  TempFolder() {
    const std::filesystem::path memory = "/dev/shm";
    const bool in_memory = ::access(memory.c_str(), W_OK) == 0;
    const std::filesystem::path parent =
        in_memory ? memory : std::filesystem::temp_directory_path();
    std::string name = (parent / "troupe_io_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "cannot create " << name;
    path_ = name;
  }
  ~TempFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void put_file(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary) << contents;
}

inline std::string get_file(const std::string& path) {
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

// Expects that `text` contains `phrase`.
inline void expect_phrase(const std::string& text, const std::string& phrase) {
  EXPECT_NE(text.find(phrase), std::string::npos)
      << "\"" << phrase << "\" is not in: " << text.substr(0, 1000);
}

}  // namespace troupe::io_test
