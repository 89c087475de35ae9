// A disk that is full, for tests of what is written then.
#pragma once

#include <csignal>
#include <cstdint>
#include <gtest/gtest.h>
#include <sys/resource.h>

namespace troupe::testing {

// As long as it lives, no file of this process can become longer than `bytes`: write(2) fails
// there, in the middle of a line. Also what gtest captures is in a file.
class FullDisk {
 public:
  explicit FullDisk(uint64_t bytes) : signal_(std::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    rlimit full = before_;
    full.rlim_cur = bytes;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  }
  ~FullDisk() {
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0);
    std::signal(SIGXFSZ, signal_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  void (*signal_)(int);
  rlimit before_{};
};

}  // namespace troupe::testing
