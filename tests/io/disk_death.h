// Ends a process at any of its changes of the disk, as a loss of power would.
#pragma once

#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "io/file.h"

namespace troupe::io_test {

inline constexpr int kDiedAtTheStep = 77;

// Runs `body` in a child process with a hook that ends it at the `step`-th change of the disk
// (counting from 0), the way a loss of power would: files whose contents had not been made durable
// lose their second half. The body may use several threads. Returns false when `body` finished
// before reaching that step.
inline bool dies_at_step(int step, const std::function<void(const DiskHook&)>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::mutex mutex;
    int count = 0;
    std::set<std::string> volatile_files;
    std::map<std::thread::id, std::string> being_synced;
    const DiskHook hook = [&](std::string_view operation, const std::string& path) {
      const std::lock_guard lock(mutex);
      std::string& synced = being_synced[std::this_thread::get_id()];
      if (!synced.empty()) volatile_files.erase(std::exchange(synced, ""));
      if (count++ == step) {
        for (const std::string& file : volatile_files) {
          std::error_code error;
          const auto size = std::filesystem::file_size(file, error);
          if (!error) std::filesystem::resize_file(file, size / 2, error);
        }
        ::_exit(kDiedAtTheStep);
      }
      if (operation == "create") volatile_files.insert(path);
      if (operation == "sync") synced = path;
    };
    try {
      body(hook);
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_TRUE(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kDiedAtTheStep)
      << "the child failed at step " << step;
  return WEXITSTATUS(status) == kDiedAtTheStep;
}

}  // namespace troupe::io_test
