// Ends a process at any of its changes of the disk, as a loss of power would.
#pragma once

#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "io/file.h"

namespace troupe::io_test {

inline constexpr int kDiedAtTheStep = 77;

// A file's name that its folder may forget. The folder is held open, so that it may be renamed.
struct NewName {
  int folder = -1;
  ino_t folder_inode = 0;
  std::string name;
};

inline ino_t inode_of(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

// Runs `body` in a child process with a hook that ends it at the `step`-th change of the disk
// (counting from 0), the way a loss of power would: files whose contents had not been made durable
// lose their second half, and files that were made since their folder was last synchronised are
// gone, whatever the folder is called by now. The body may use several threads. Returns false when
// `body` finished before reaching that step.
inline bool dies_at_step(int step, const std::function<void(const DiskHook&)>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::mutex mutex;
    int count = 0;
    std::set<std::string> volatile_files;
    std::map<std::thread::id, std::string> being_synced;
    std::vector<NewName> new_names;
    std::map<std::thread::id, ino_t> folder_being_synced;
    const DiskHook hook = [&](std::string_view operation, const std::string& path) {
      const std::lock_guard lock(mutex);
      std::string& synced = being_synced[std::this_thread::get_id()];
      if (!synced.empty()) volatile_files.erase(std::exchange(synced, ""));
      ino_t& folder = folder_being_synced[std::this_thread::get_id()];
      if (folder != 0) {
        std::erase_if(new_names, [&](const NewName& each) { return each.folder_inode == folder; });
        folder = 0;
      }
      if (count++ == step) {
        for (const std::string& file : volatile_files) {
          std::error_code error;
          const auto size = std::filesystem::file_size(file, error);
          if (!error) std::filesystem::resize_file(file, size / 2, error);
        }
        for (const NewName& each : new_names) ::unlinkat(each.folder, each.name.c_str(), 0);
        ::_exit(kDiedAtTheStep);
      }
      if (operation == "create") {
        volatile_files.insert(path);
        const std::string parent = parent_path(path);
        new_names.push_back({.folder = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC),
                             .folder_inode = inode_of(parent),
                             .name = std::filesystem::path(path).filename().string()});
      }
      if (operation == "sync directory") folder = inode_of(path);
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
