// What the tests on a GPU share: whether there is one, and the lines of their reports.
#pragma once

#include <cstdio>
#include <gtest/gtest.h>
#include <string>

#include "runtime/device_memory.h"

namespace troupe::testing {

// At the start of every test.
#define TROUPE_NEED_GPU()                                           \
  do {                                                              \
    if (const std::string reason = why_no_gpu(); !reason.empty()) { \
      GTEST_SKIP() << "no GPU can be used: " << reason;             \
    }                                                               \
  } while (false)

// One line of the report, on standard output whether the test passes or not.
inline void report(const std::string& line) {
  std::printf("[ report   ] %s\n", line.c_str());
  std::fflush(stdout);
}

}  // namespace troupe::testing
