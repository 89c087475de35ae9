// One run at a time in a folder: who holds it is named, and the dead hold nothing.
#include "io/folder_lock.h"

#include <csignal>
#include <filesystem>
#include <optional>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

#include "io/io_test_support.h"

namespace troupe {
namespace {

using io_test::expect_phrase;
using io_test::get_file;
using io_test::message_of;
using io_test::put_file;
using io_test::TempFolder;

TEST(FolderLock, ASecondHolderIsToldWhoTheFirstIs) {
  const TempFolder dir;
  std::optional<FolderLock> first(std::in_place, dir / "run");
  ASSERT_TRUE(first->holds());
  const std::string message =
      message_of(ExitStatus::bad_request, [&] { const FolderLock second(dir / "run"); });
  expect_phrase(message, "process " + std::to_string(::getpid()));
  EXPECT_EQ(message.find((dir / "run") + ": "), 0U) << message;
  const FolderLock elsewhere(dir / "other");
  first.reset();
  EXPECT_TRUE(FolderLock(dir / "run").holds());
}

// A run that is refused after it has the lock leaves nothing.
TEST(FolderLock, RemovesWhatItMadeAndNothingElse) {
  const TempFolder dir;
  { const FolderLock lock(dir / "new"); }
  EXPECT_FALSE(std::filesystem::exists(dir / "new"));
  std::filesystem::create_directory(dir / "old");
  { const FolderLock lock(dir / "old"); }
  EXPECT_TRUE(std::filesystem::is_empty(dir / "old"));
  {
    const FolderLock lock(dir / "used");
    std::filesystem::create_directory(dir / "used/checkpoints");
  }
  EXPECT_TRUE(std::filesystem::exists(dir / "used/checkpoints"));
  EXPECT_FALSE(std::filesystem::exists(dir / "used/.lock"));
}

TEST(FolderLock, AProcessThatWasKilledHoldsNothing) {
  const TempFolder dir;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(dir.path());
    [[maybe_unused]] const auto written = ::write(ready[1], "x", 1);
    ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  expect_phrase(message_of(ExitStatus::bad_request, [&] { const FolderLock lock(dir.path()); }),
                "process " + std::to_string(child));
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(FolderLock(dir.path()).holds());
}

TEST(FolderLock, WhatADeadHolderWroteIsGone) {
  const TempFolder dir;
  put_file(dir / ".lock", "host " + std::string(200, 'x') + ", process 1");
  const FolderLock lock(dir.path());
  const std::string text = get_file(dir / ".lock");
  EXPECT_TRUE(text.ends_with(", process " + std::to_string(::getpid()))) << text;
}

}  // namespace
}  // namespace troupe
