// Durable files: reading, mapping, and the operations that change a disk.
//
// Every function either does what it says or throws a UserError (exit status 1; 2 for reading a
// file that does not exist) whose message names the path and the system's reason ("No space left on
// device"). "Durable" means that the contents
// survive a loss of power once the function has returned: the data has been given to fsync.
//
// All changes go through a Disk, which can call a hook before each of them; tests use it to fail or
// to die at every single step. Reading functions are free functions. Everything may be called from
// any thread; one object belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace troupe {

// The whole file as text. Refuses anything but a regular file, and files above `max_bytes`.
std::string read_file(const std::string& path, uint64_t max_bytes);

// Whether anything, even a dangling link, has this name. A name that cannot be looked up (without
// permission) counts as existing, so that using it says why.
bool path_exists(const std::string& path);

// The size of a regular file in bytes.
uint64_t file_size(const std::string& path);

// Bytes that can still be written below `folder`, or, while it does not exist, below the nearest
// folder above it that does; empty where the file system does not say.
std::optional<uint64_t> free_bytes(const std::string& folder);

// A regular file mapped for reading. It owns the mapping; spans into it live as long as it does
// (moving it keeps them valid). The file must not be shortened by others while it is mapped: the
// operating system would end the process at the first access beyond the new end.
class MappedFile {
 public:
  static MappedFile open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }
  // These bytes are not needed soon: they count no longer as memory of the process. Reading them
  // again is correct, and slower.
  void forget(std::span<const std::byte> bytes) const;

 private:
  MappedFile() = default;
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Called before each operation that changes the disk, with what is about to be done ("create",
// "write", "sync", "rename", "remove", "make directory", "make link", "sync directory") and the
// path it is done to. What it throws passes through to the caller, and the operation is not done.
using DiskHook = std::function<void(std::string_view operation, const std::string& path)>;

class Disk {
 public:
  Disk() = default;
  explicit Disk(DiskHook hook) : hook_(std::move(hook)) {}

  // Creates the directory and its missing parents, durably. An existing directory is left as it is.
  void make_directories(const std::string& path) const;
  // Creates or replaces the file and makes its contents durable. The name becomes durable with
  // sync_directory of its parent. A failure may leave a partial file.
  void write_file(const std::string& path, std::string_view contents) const;
  // Makes names in the directory (created, renamed, removed) durable.
  void sync_directory(const std::string& path) const;
  // Atomic: at every moment either the old or the new name exists. Replaces a file or an empty
  // directory at `to`; refuses other directories. Durable after sync_directory of the parent.
  void rename(const std::string& from, const std::string& to) const;
  // Creates a symbolic link `path` to `target`; nothing may have this name yet. Durable after
  // sync_directory of the parent.
  void make_link(const std::string& target, const std::string& path) const;
  // Removes a file or a directory with all its contents. A missing path is no error. Not atomic.
  void remove_tree(const std::string& path) const;

 private:
  friend class OutputFile;
  void before(std::string_view operation, const std::string& path) const {
    if (hook_) hook_(operation, path);
  }
  DiskHook hook_;
};

// A new file (or one emptied first) that is written from front to back. The Disk must outlive it.
// A file whose sync_and_close was never reached is closed and left as it is: the caller removes it.
class OutputFile {
 public:
  OutputFile(const Disk& disk, std::string path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  void write(const void* data, size_t bytes);
  // Makes the contents durable and closes the file; nothing may be written afterwards.
  void sync_and_close();

  const std::string& path() const { return path_; }

 private:
  const Disk& disk_;
  std::string path_;
  int descriptor_ = -1;
};

// The path of `name` inside `folder`, and the folder that holds `path` ("." for a bare name).
std::string join_path(const std::string& folder, std::string_view name);
std::string parent_path(const std::string& path);

}  // namespace troupe
