// One run at a time writes into a folder: a lock on DIR/.lock that its holder keeps while it lives.
//
// The kernel gives the lock up with the process that holds it, however that ends, so a lock that is
// left behind does not exist; the file of a process that was killed stays and means nothing. Two
// holders exclude each other on one host, and on several hosts where the file system carries locks
// over (NFS does). The file names its holder for the message. A FolderLock belongs to one thread.
// Errors are UserErrors.
#pragma once

#include <string>

namespace troupe {

class FolderLock {
 public:
  // Makes the folder if it is missing; the end of the lock removes a folder that it has made if
  // nothing was written there. A folder that is locked elsewhere is a bad request that names the
  // host and the process which hold it. On a file system without locks it holds nothing; holds()
  // then says so.
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  bool holds() const { return holds_; }

 private:
  // False: this file system has no locks.
  bool lock();

  std::string folder_;
  std::string path_;  // of the file
  bool made_folder_;
  int descriptor_ = -1;
  bool holds_ = false;
};

}  // namespace troupe
