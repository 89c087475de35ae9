#include "io/file.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/error.h"

namespace troupe {
namespace {

// Above this a single write(2) is cut short by the kernel; 1 GiB pieces keep the loop simple.
constexpr size_t kLargestWrite = size_t{1} << 30;

[[noreturn]] void throw_system_failure(const std::string& path, const std::string& what,
                                       int error_number) {
  throw_failed(path + ": cannot " + what + ": " + std::generic_category().message(error_number));
}

// Owns a descriptor for the duration of a function.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  int get() const { return value_; }

 private:
  int value_;
};

int open_retrying(const std::string& path, int flags, mode_t mode = 0) {
  int descriptor = -1;
  do {
    descriptor = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

int sync_retrying(int descriptor) {
  int result = 0;
  do {
    result = ::fsync(descriptor);
  } while (result < 0 && errno == EINTR);
  return result;
}

// Opens a regular file for reading and gives its size. O_NONBLOCK keeps a named pipe from blocking
// the open; it changes nothing for regular files.
int open_regular(const std::string& path, uint64_t* size) {
  const int descriptor = open_retrying(path, O_RDONLY | O_NONBLOCK);
  if (descriptor < 0 && (errno == ENOENT || errno == ENOTDIR)) {
    throw_bad_request(path + ": No such file or directory");
  }
  if (descriptor < 0) throw_system_failure(path, "open for reading", errno);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) {
    const int error_number = errno;
    ::close(descriptor);
    throw_system_failure(path, "read its size", error_number);
  }
  if (!S_ISREG(status.st_mode)) {
    ::close(descriptor);
    throw_failed(path + ": is not a regular file");
  }
  *size = static_cast<uint64_t>(status.st_size);
  return descriptor;
}

}  // namespace

std::string read_file(const std::string& path, uint64_t max_bytes) {
  uint64_t size = 0;
  const Descriptor descriptor(open_regular(path, &size));
  if (size > max_bytes) {
    throw_failed(path + ": is " + std::to_string(size) + " bytes long; at most " +
                 std::to_string(max_bytes) + " are expected here");
  }
  std::string contents(size, '\0');
  size_t done = 0;
  while (done < contents.size()) {
    const ssize_t count = ::read(descriptor.get(), contents.data() + done, contents.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_system_failure(path, "read", errno);
    if (count == 0) throw_failed(path + ": became shorter while it was read");
    done += static_cast<size_t>(count);
  }
  return contents;
}

bool path_exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::symlink_status(path, error).type() !=
         std::filesystem::file_type::not_found;
}

uint64_t file_size(const std::string& path) {
  uint64_t size = 0;
  const Descriptor descriptor(open_regular(path, &size));
  return size;
}

std::optional<uint64_t> free_bytes(const std::string& folder) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(folder, error).lexically_normal();
  while (!std::filesystem::is_directory(path, error) && path.has_relative_path()) {
    path = path.parent_path();
  }
  const std::filesystem::space_info space = std::filesystem::space(path, error);
  if (error || space.capacity == 0) return std::nullopt;
  return space.available;
}

MappedFile MappedFile::open(const std::string& path) {
  uint64_t size = 0;
  const Descriptor descriptor(open_regular(path, &size));
  MappedFile file;
  file.path_ = path;
  if (size == 0) return file;  // mmap refuses empty mappings
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (data == MAP_FAILED) throw_system_failure(path, "map into memory", errno);
  file.data_ = static_cast<const std::byte*>(data);
  file.size_ = size;
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void MappedFile::forget(std::span<const std::byte> bytes) const {
  if (bytes.empty()) return;
  // A fault maps pages around the one that was touched, too, and so those that a call before has
  // forgotten: whole windows of them are forgotten. Others may use pages at the ends, and read them
  // again.
  constexpr size_t kWindow = size_t{64} << 10;
  const auto first = static_cast<size_t>(bytes.data() - data_);
  const size_t begin = first / kWindow * kWindow;
  const size_t end = std::min((first + bytes.size() + kWindow - 1) / kWindow * kWindow, size_);
  ::madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);  // advice only
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void Disk::make_directories(const std::string& path) const {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return;
  const std::string parent = parent_path(path);
  if (parent != path) make_directories(parent);
  before("make directory", path);
  if (::mkdir(path.c_str(), 0777) != 0) {
    const int error_number = errno;
    // Another process may have made it in the meantime.
    if (error_number == EEXIST && std::filesystem::is_directory(path, error)) return;
    if (error_number == EEXIST) throw_bad_request(path + " is a file, not a folder.");
    throw_system_failure(path, "make this directory", error_number);
  }
  sync_directory(parent);
}

void Disk::write_file(const std::string& path, std::string_view contents) const {
  OutputFile file(*this, path);
  file.write(contents.data(), contents.size());
  file.sync_and_close();
}

void Disk::sync_directory(const std::string& path) const {
  before("sync directory", path);
  const Descriptor descriptor(open_retrying(path, O_RDONLY | O_DIRECTORY));
  if (descriptor.get() < 0) throw_system_failure(path, "open this directory", errno);
  // Some file systems have nothing to synchronise for directories and say EINVAL.
  if (sync_retrying(descriptor.get()) != 0 && errno != EINVAL) {
    throw_system_failure(path, "make the names in this directory durable", errno);
  }
}

void Disk::rename(const std::string& from, const std::string& to) const {
  before("rename", from);
  if (::rename(from.c_str(), to.c_str()) != 0) {
    throw_system_failure(from, "rename to " + to, errno);
  }
}

void Disk::make_link(const std::string& target, const std::string& path) const {
  before("make link", path);
  if (::symlink(target.c_str(), path.c_str()) != 0) {
    throw_system_failure(path, "make a link to " + target, errno);
  }
}

void Disk::remove_tree(const std::string& path) const {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (status.type() == fs::file_type::not_found) return;
  if (status.type() == fs::file_type::directory) {
    std::vector<std::string> children;
    fs::directory_iterator child(path, error);
    while (!error && child != fs::directory_iterator()) {
      children.push_back(child->path().string());
      child.increment(error);
    }
    if (error) throw_failed(path + ": cannot list this directory: " + error.message());
    std::sort(children.begin(), children.end());
    for (const std::string& name : children) remove_tree(name);
  }
  before("remove", path);
  fs::remove(path, error);
  if (error) throw_failed(path + ": cannot remove: " + error.message());
}

OutputFile::OutputFile(const Disk& disk, std::string path) : disk_(disk), path_(std::move(path)) {
  disk_.before("create", path_);
  descriptor_ = open_retrying(path_, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (descriptor_ < 0) throw_system_failure(path_, "create", errno);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::write(const void* data, size_t bytes) {
  TROUPE_CHECK(descriptor_ >= 0, path_ + " is already closed");
  if (bytes == 0) return;
  disk_.before("write", path_);
  const char* next = static_cast<const char*>(data);
  size_t left = bytes;
  while (left > 0) {
    const ssize_t count = ::write(descriptor_, next, std::min(left, kLargestWrite));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw_system_failure(path_, "write " + std::to_string(left) + " more bytes", errno);
    }
    next += count;
    left -= static_cast<size_t>(count);
  }
}

void OutputFile::sync_and_close() {
  TROUPE_CHECK(descriptor_ >= 0, path_ + " is already closed");
  disk_.before("sync", path_);
  if (sync_retrying(descriptor_) != 0) throw_system_failure(path_, "make durable", errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) throw_system_failure(path_, "close", errno);
}

std::string join_path(const std::string& folder, std::string_view name) {
  return (std::filesystem::path(folder) / name).string();
}

std::string parent_path(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

}  // namespace troupe
