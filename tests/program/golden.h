// Golden texts: what a test prints is compared with a file of tests/golden, which people read as
// documentation. After an intended change, run the test with the environment variable
// TROUPE_UPDATE_GOLDEN=1 to write the files anew, and review the difference like any other code.
#pragma once

#include <cstdlib>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>

namespace troupe::testing {

inline void expect_golden(const std::string& text, const std::string& name) {
  const std::string path = std::string(TROUPE_SOURCE_DIR "/tests/golden/") + name;
  if (std::getenv("TROUPE_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path, std::ios::binary) << text;
    return;
  }
  std::ifstream in(path, std::ios::binary);
  ASSERT_TRUE(in.good()) << path << " is missing; see golden.h";
  const std::string golden{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  EXPECT_EQ(golden, text) << "differs from " << path << "; see golden.h";
}

}  // namespace troupe::testing
