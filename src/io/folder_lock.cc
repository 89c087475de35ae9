#include "io/folder_lock.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/machine.h"
#include "base/text.h"
#include "io/file.h"

namespace troupe {
namespace {

// What the holder has written: "host, process 123".
std::string read_holder(int descriptor) {
  std::array<char, 300> text{};
  const ssize_t count = ::pread(descriptor, text.data(), text.size(), 0);
  const std::string holder(text.data(), count > 0 ? static_cast<size_t>(count) : 0);
  return holder.empty() ? "another process" : printable(holder);
}

// The open file is the one with this name: its holder may have removed it since it was opened.
bool is_at(int descriptor, const std::string& path) {
  struct stat opened = {};
  struct stat named = {};
  return ::fstat(descriptor, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder)
    : folder_(folder), path_(join_path(folder, ".lock")), made_folder_(!path_exists(folder)) {
  try {
    Disk().make_directories(folder);
  } catch (const UserError& error) {
    throw UserError(error.status(), folder + ": " + error.what());
  }
  do {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor_ < 0) throw_failed(path_ + ": cannot open: " + std::strerror(errno));
    if (!lock()) return;
  } while (!is_at(descriptor_, path_));
  holds_ = true;
  const std::string holder = "host " + host_name() + ", process " + std::to_string(::getpid());
  // The text is for people; without it the lock holds as well.
  [[maybe_unused]] const bool named = ::ftruncate(descriptor_, 0) == 0 &&
                                      ::pwrite(descriptor_, holder.data(), holder.size(), 0) > 0;
}

FolderLock::~FolderLock() {
  if (holds_) {
    ::unlink(path_.c_str());
    if (made_folder_) ::rmdir(folder_.c_str());  // where something was written, it stays
  }
  ::close(descriptor_);
}

bool FolderLock::lock() {
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return false;
    const std::string holder = read_holder(descriptor_);
    ::close(descriptor_);
    throw_bad_request(folder_ + ": a run that is still going writes into this folder (" + holder +
                      "). Wait until it has ended, stop it, or save elsewhere.");
  }
  return true;
}

}  // namespace troupe
