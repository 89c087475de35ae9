// Folders of runs that were not told where to save: what they are called, and that each run gets
// one of its own.
#include "train/run_folder.h"

#include <ctime>
#include <filesystem>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/files.h"
#include "support/fixed_group.h"

namespace troupe::testing {
namespace {

namespace fs = std::filesystem;

// In an empty working directory.
class RunFolderTest : public ::testing::Test {
 protected:
  RunFolderTest() : before_(fs::current_path()) { fs::current_path(folder_.path()); }
  ~RunFolderTest() override { fs::current_path(before_); }

 private:
  TempFolder folder_;
  fs::path before_;
};

// "20261122-214012", as the clock on the wall says.
std::string stamp_of(std::time_t time) {
  std::tm parts{};
  localtime_r(&time, &parts);
  char text[32] = {};
  std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", &parts);
  return text;
}

TEST_F(RunFolderTest, IsNamedForTheModelAndTheTime) {
  const std::time_t before = std::time(nullptr);
  const std::string name = make_run_folder("mixtral-8x7b", nullptr);
  std::set<std::string> possible;
  for (std::time_t time = before; time <= std::time(nullptr); ++time) {
    possible.insert("runs/mixtral-8x7b-" + stamp_of(time));
  }
  EXPECT_TRUE(possible.contains(name)) << name;
  EXPECT_TRUE(fs::is_directory(name));
}

TEST_F(RunFolderTest, RunsOfOneSecondAreNumbered) {
  // Those of the next minute are taken.
  const std::time_t now = std::time(nullptr);
  for (std::time_t time = now; time < now + 60; ++time) {
    fs::create_directories("runs/a-" + stamp_of(time));
    fs::create_directories("runs/a-" + stamp_of(time) + "-2");
  }
  const std::string name = make_run_folder("a", nullptr);
  EXPECT_TRUE(name.ends_with("-3")) << name;
  EXPECT_TRUE(fs::is_directory(name));
}

TEST_F(RunFolderTest, OfAPathTheLastPartIsTheModel) {
  const auto named = [](const std::string& model) {
    const std::string name = make_run_folder(model, nullptr);
    EXPECT_TRUE(fs::is_directory(name)) << name;
    const size_t begin = std::string("runs/").size();
    return name.substr(begin, name.find("-20") - begin);
  };
  EXPECT_EQ(named("models/my_model"), "my_model");
  EXPECT_EQ(named("models/tiny.v2/"), "tiny.v2");
  EXPECT_EQ(named("models/tiny/config.json"), "tiny");
  EXPECT_EQ(named("models/tiny.json"), "tiny");
  EXPECT_EQ(named("a b:c"), "a-b-c");
  for (const char* nameless : {"", "/", ".", "..", "config.json"}) {
    EXPECT_EQ(named(nameless), "model") << nameless;
  }
}

// Rank 0 makes the folder; the others hear of it.
TEST_F(RunFolderTest, RanksHaveTheSame) {
  FixedGroup group({.own_ranks = {1}, .ranks = 2});
  group.answers = {{20261122214012, 0}, {3, 0}};
  EXPECT_EQ(make_run_folder("a", &group), "runs/a-20261122-214012-3");
  EXPECT_FALSE(fs::exists("runs"));
  group.answers = {{20260102030405, 0}, {1, 0}};
  EXPECT_EQ(make_run_folder("a", &group), "runs/a-20260102-030405");
}

TEST_F(RunFolderTest, WhatCannotBeMadeIsNamed) {
  const std::string model(300, 'm');
  const std::string message =
      message_of(ExitStatus::failed, [&] { make_run_folder(model, nullptr); });
  EXPECT_TRUE(message.starts_with("Cannot make the folder runs/" + model + "-20")) << message;
  EXPECT_TRUE(
      message.ends_with(" for the run: File name too long. Say where to save with --save "
                        "DIR, or --no-save."))
      << message;
}

TEST_F(RunFolderTest, AnEmptyOneIsRemoved) {
  fs::create_directories("runs/empty");
  fs::create_directories("runs/used");
  put_file("runs/used/file", "");
  remove_if_empty("runs/empty");
  remove_if_empty("runs/used");
  EXPECT_FALSE(fs::exists("runs/empty"));
  EXPECT_TRUE(fs::exists("runs/used/file"));
}

}  // namespace
}  // namespace troupe::testing
