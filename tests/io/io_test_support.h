// What the tests of the io room share: folders in memory that clean up after themselves, whole
// files, and the message of an expected error.
#pragma once

#include <filesystem>
#include <unistd.h>

#include "support/errors.h"
#include "support/files.h"

namespace troupe::io_test {

using testing::expect_phrase;
using testing::get_file;
using testing::message_of;
using testing::put_file;

// A new folder, in memory where the system offers that: these tests make thousands of files
// durable, and losing power is part of the tests, not left to the disk.
class TempFolder : public testing::TempFolder {
 public:
  TempFolder() : testing::TempFolder(parent()) {}

 private:
  static std::filesystem::path parent() {
    const std::filesystem::path memory = "/dev/shm";
    return ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
  }
};

}  // namespace troupe::io_test
