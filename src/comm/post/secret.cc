#include "comm/post/secret.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <string_view>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "comm/post/socket.h"

namespace troupe {
namespace {

constexpr size_t kShortest = 16;
constexpr size_t kLongest = 4096;
constexpr std::string_view kRemedy =
    "give all ranks the same --rendezvous-secret-file FILE or TROUPE_RENDEZVOUS_SECRET";

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  explicit operator bool() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  const int number_;
};

[[noreturn]] void refuse(const std::string& path, const std::string& problem) {
  throw_bad_request(fmt::format("{}: {}.", printable(path), problem));
}

std::string trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(kSpace) - begin + 1));
}

// At most one byte more than a secret may have.
std::string read_start(const Descriptor& file, const std::string& path) {
  std::array<char, kLongest + 1> buffer{};
  size_t count = 0;
  while (count < buffer.size()) {
    const ssize_t got = read(file.number(), buffer.data() + count, buffer.size() - count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path, system_error(errno));
    if (got == 0) break;
    count += static_cast<size_t>(got);
  }
  return {buffer.data(), count};
}

std::string hexadecimal_random() {
  std::array<unsigned char, 32> bytes{};
  size_t count = 0;
  while (count < bytes.size()) {
    const ssize_t got = getrandom(bytes.data() + count, bytes.size() - count, 0);
    if (got < 0 && errno != EINTR) throw_failed("the system gives no random numbers.");
    if (got > 0) count += static_cast<size_t>(got);
  }
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

void require_own_folder(const std::string& folder) {
  if (mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    refuse(folder, fmt::format("cannot be created ({}) for the secret of the ranks; {}",
                               system_error(errno), kRemedy));
  }
  struct stat status = {};
  if (lstat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
      status.st_uid != geteuid() || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    refuse(folder, fmt::format("the secret of the ranks would not be safe there, because it is not "
                               "a folder of this user alone; {}",
                               kRemedy));
  }
}

// Whole at once: other ranks may make it at the same time.
void create_secret(const std::string& folder, const std::string& path) {
  std::string temporary = folder + "/new_XXXXXX";
  const Descriptor file(mkostemp(temporary.data(), O_CLOEXEC));
  const std::string text = hexadecimal_random() + "\n";
  const bool is_written =
      file && write(file.number(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int write_error = errno;
  const bool is_there =
      is_written && (link(temporary.c_str(), path.c_str()) == 0 || errno == EEXIST);
  const int link_error = errno;
  if (file) unlink(temporary.c_str());
  if (is_there) return;
  refuse(path, fmt::format("cannot be written ({}); {}",
                           system_error(is_written ? link_error : write_error), kRemedy));
}

}  // namespace

std::string checked_secret(const std::string& secret, const std::string& source) {
  std::string text = trimmed(secret);
  if (text.size() >= kShortest && text.size() <= kLongest) return text;
  throw_bad_request(
      fmt::format("{}: a secret of ranks has {} to {} bytes; `openssl rand -hex 32` prints one.",
                  source, kShortest, kLongest));
}

std::string read_secret_file(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status = {};
  if (!file || fstat(file.number(), &status) != 0) refuse(path, system_error(errno));
  if (!S_ISREG(status.st_mode)) refuse(path, "is not a regular file");
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    refuse(path, fmt::format("others than its owner can read this secret. Run: chmod 600 {}",
                             printable(path)));
  }
  return checked_secret(read_start(file, path), printable(path));
}

std::string machine_secret() {
  const std::string folder = fmt::format("/tmp/troupe-{}", geteuid());
  const std::string path = folder + "/rendezvous_secret";
  require_own_folder(folder);
  struct stat status = {};
  if (lstat(path.c_str(), &status) != 0 && errno == ENOENT) create_secret(folder, path);
  return read_secret_file(path);
}

}  // namespace troupe
