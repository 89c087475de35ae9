// Where the secrets of ranks come from, and which files are refused.
#include "comm/post/secret.h"

#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <sys/stat.h>

#include "base/error.h"
#include "support/files.h"

namespace troupe {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::bad_request);
    return error.what();
  }
  return {};
}

TEST(Secret, IsReadFromAFileOfItsOwner) {
  const testing::TempFolder folder;
  const std::string path = folder / "secret";
  testing::put_file(path, "  sixteen letters.\n");
  chmod(path.c_str(), 0600);
  EXPECT_EQ(read_secret_file(path), "sixteen letters.");
  chmod(path.c_str(), 0640);
  EXPECT_NE(message_of([&] { read_secret_file(path); }).find("chmod 600 " + path),
            std::string::npos);
  chmod(path.c_str(), 0600);
  for (const size_t bytes : {16, 4096}) {
    testing::put_file(path, std::string(bytes, 'x'));
    EXPECT_EQ(read_secret_file(path), std::string(bytes, 'x'));
  }
  for (const size_t bytes : {0, 15, 4097}) {
    testing::put_file(path, std::string(bytes, 'x'));
    EXPECT_NE(message_of([&] { read_secret_file(path); }).find("16 to 4096 bytes"),
              std::string::npos);
  }
  EXPECT_NE(message_of([&] { read_secret_file(folder.path()); }).find("not a regular file"),
            std::string::npos);
  EXPECT_NE(message_of([&] { read_secret_file(path + "2"); }).find("No such file"),
            std::string::npos);
}

TEST(Secret, OfTheMachineIsTheSameForAllProcesses) {
  const std::string secret = machine_secret();
  EXPECT_EQ(secret.size(), 64U);
  EXPECT_EQ(machine_secret(), secret);
}

}  // namespace
}  // namespace troupe
