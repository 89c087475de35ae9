#include "data/indexed_dataset.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <limits>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "base/error.h"

namespace troupe {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr uint64_t kVersion = 1;
constexpr int64_t kVersionAt = 9;
constexpr int64_t kTypeAt = 17;
constexpr int64_t kSequencesAt = 18;
constexpr int64_t kDocumentsAt = 26;
constexpr int64_t kHeaderSize = 34;
constexpr size_t kBufferSize = size_t{1} << 20;

// The index is packed: its fields and arrays are not aligned.
template <class T>
T load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// Calls body(T{}) with the C++ type of the tokens.
template <class Body>
void with_type(TokenType type, const Body& body) {
  switch (type) {
    case TokenType::u8:
      return body(uint8_t{});
    case TokenType::i8:
      return body(int8_t{});
    case TokenType::i16:
      return body(int16_t{});
    case TokenType::i32:
      return body(int32_t{});
    case TokenType::i64:
      return body(int64_t{});
    case TokenType::u16:
      return body(uint16_t{});
  }
}

std::string idx_path(const std::string& prefix) {
  return prefix + ".idx";
}
std::string bin_path(const std::string& prefix) {
  return prefix + ".bin";
}
std::string partial(const std::string& path) {
  return path + ".partial";
}

std::string system_message(int error) {
  return std::generic_category().message(error);
}

[[noreturn]] void throw_system(const char* action, const std::string& path, int error) {
  throw_failed(fmt::format("cannot {} {}: {}", action, path, system_message(error)));
}

// A file descriptor that closes itself.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// Makes renames and removals in the folder of `path` durable.
void sync_folder(const std::string& path) {
  const std::string folder = folder_of(path);
  const File file(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file.get() < 0) throw_system("open", folder, errno);
  // Some file systems cannot sync a folder and say EINVAL; their renames are then as durable as
  // they can be.
  if (::fsync(file.get()) != 0 && errno != EINVAL) throw_system("sync", folder, errno);
}

void rename_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    throw_failed(fmt::format("cannot rename {} to {}: {}", from, to, system_message(errno)));
  }
}

}  // namespace

int64_t size_of(TokenType type) {
  int64_t size = 0;
  with_type(type, [&](auto zero) { size = static_cast<int64_t>(sizeof(zero)); });
  return size;
}

std::string_view name_of(TokenType type) {
  switch (type) {
    case TokenType::u8:
      return "u8";
    case TokenType::i8:
      return "i8";
    case TokenType::i16:
      return "i16";
    case TokenType::i32:
      return "i32";
    case TokenType::i64:
      return "i64";
    case TokenType::u16:
      return "u16";
  }
  return "?";
}

TokenType token_type_for_vocabulary(int64_t vocab_size) {
  return vocab_size < 65500 ? TokenType::u16 : TokenType::i32;
}

IndexedDataset::Mapping::~Mapping() {
  if (data != nullptr && own.empty())
    ::munmap(const_cast<unsigned char*>(data), static_cast<size_t>(size));
}

void IndexedDataset::Mapping::open(const std::string& path) {
  // O_NONBLOCK keeps a named pipe from blocking; it changes nothing for regular files.
  const File file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0) throw_system("open", path, errno);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_system("examine", path, errno);
  if (!S_ISREG(status.st_mode)) throw_failed(fmt::format("{} is not a regular file", path));
  size = status.st_size;
  if (size == 0) return;  // an empty mapping is an error to mmap
  void* mapped = ::mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) throw_system("map", path, errno);
  data = static_cast<const unsigned char*>(mapped);
}

void IndexedDataset::Mapping::keep(std::vector<unsigned char> bytes) {
  own = std::move(bytes);
  data = own.data();
  size = static_cast<int64_t>(own.size());
}

IndexedDataset::IndexedDataset(const std::string& name, const Parts& parts) : prefix_(name) {
  std::vector<unsigned char> idx;
  const auto append = [&](const auto* values, size_t count) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values);
    idx.insert(idx.end(), bytes, bytes + count * sizeof(*values));
  };
  const auto count = static_cast<uint64_t>(parts.lengths.size());
  const uint64_t boundaries = count + 1;
  append(kMagic, sizeof(kMagic));
  append(&kVersion, 1);
  idx.push_back(static_cast<unsigned char>(parts.type));
  append(&count, 1);
  append(&boundaries, 1);
  append(parts.lengths.data(), count);
  append(parts.starts.data(), count);
  for (uint64_t document = 0; document < boundaries; ++document) append(&document, 1);
  idx_.keep(std::move(idx));
  bin_.keep(parts.tokens);
  check_index();
}

IndexedDataset::IndexedDataset(const std::string& prefix) : prefix_(prefix) {
  for (const std::string& path : {idx_path(prefix), bin_path(prefix)}) {
    std::error_code error;
    if (!std::filesystem::exists(path, error)) {
      const bool has_extension = prefix.ends_with(".bin") || prefix.ends_with(".idx");
      throw_bad_request(fmt::format(
          "data file {} does not exist; {}", path,
          has_extension ? "give the data path without .bin or .idx"
                        : "a data set is a pair PREFIX.bin and PREFIX.idx, as `troupe tokenize` "
                          "or Megatron's preprocess_data.py write it"));
    }
  }
  idx_.open(idx_path(prefix));
  bin_.open(bin_path(prefix));
  check_index();
}

IndexedDataset::~IndexedDataset() = default;

void IndexedDataset::check_index() {
  const std::string path = idx_path(prefix_);
  const auto refuse = [&](const std::string& what) {
    throw_failed(fmt::format("{}: {}; write the data set again", path, what));
  };

  if (idx_.size < kHeaderSize) {
    refuse(fmt::format("{} bytes are fewer than the header's {}", idx_.size, kHeaderSize));
  }
  if (std::memcmp(idx_.data, kMagic, sizeof(kMagic)) != 0) {
    refuse("not a Megatron index (it does not begin with MMIDIDX)");
  }
  const auto version = load<uint64_t>(idx_.data + kVersionAt);
  if (version != kVersion) {
    refuse(fmt::format("index version {}, but only {} is known", version, kVersion));
  }
  const int code = idx_.data[kTypeAt];
  if (code == 6 || code == 7) {
    refuse(fmt::format("element type code {} is floating point, not tokens", code));
  }
  if (code < 1 || code > 8) refuse(fmt::format("unknown element type code {}", code));
  type_ = static_cast<TokenType>(code);

  // Counts are compared by division, so that none can overflow.
  const auto sequences = load<uint64_t>(idx_.data + kSequencesAt);
  const auto boundaries = load<uint64_t>(idx_.data + kDocumentsAt);
  auto room = static_cast<uint64_t>(idx_.size - kHeaderSize);
  if (sequences > room / 12) {
    refuse(fmt::format("{} sequences do not fit in a file of {} bytes (truncated?)", sequences,
                       idx_.size));
  }
  room -= sequences * 12;
  if (boundaries > room / 8) {
    refuse(fmt::format("{} document boundaries do not fit in a file of {} bytes (truncated?)",
                       boundaries, idx_.size));
  }
  room -= boundaries * 8;
  // One byte per sequence may follow: the modes of multi-modal data, which are of no use here.
  if (room != 0 && room != sequences) {
    refuse(fmt::format("{} bytes follow the index that do not belong to it", room));
  }
  if (boundaries == 0) refuse("no document boundaries (there is at least the first, 0)");

  num_sequences_ = static_cast<int64_t>(sequences);
  num_documents_ = static_cast<int64_t>(boundaries) - 1;
  lengths_ = idx_.data + kHeaderSize;
  starts_ = lengths_ + 4 * sequences;
  boundaries_ = starts_ + 8 * sequences;

  const int64_t element = size_of(type_);
  for (int64_t sequence = 0; sequence < num_sequences_; ++sequence) {
    const int64_t length = sequence_length(sequence);
    const int64_t start = sequence_start(sequence);
    if (length < 0) refuse(fmt::format("sequence {} has the length {}", sequence, length));
    if (start < 0 || start > bin_.size || length > (bin_.size - start) / element) {
      refuse(
          fmt::format("sequence {} ({} tokens of {} bytes at byte {}) lies outside {} of {} "
                      "bytes (truncated?)",
                      sequence, length, element, start, bin_path(prefix_), bin_.size));
    }
    num_tokens_ += length;
  }
  if (first_sequence(0) != 0) {
    refuse(fmt::format("the first document begins at sequence {}, not 0", first_sequence(0)));
  }
  for (int64_t document = 0; document < num_documents_; ++document) {
    if (first_sequence(document + 1) < first_sequence(document)) {
      refuse(fmt::format("document {} ends at sequence {}, before its begin at {}", document,
                         first_sequence(document + 1), first_sequence(document)));
    }
  }
  if (first_sequence(num_documents_) != num_sequences_) {
    refuse(fmt::format("the last document ends at sequence {}, but there are {} sequences",
                       first_sequence(num_documents_), num_sequences_));
  }
}

int64_t IndexedDataset::sequence_length(int64_t sequence) const {
  return load<int32_t>(lengths_ + 4 * sequence);
}

int64_t IndexedDataset::sequence_start(int64_t sequence) const {
  return load<int64_t>(starts_ + 8 * sequence);
}

int64_t IndexedDataset::first_sequence(int64_t document) const {
  return load<int64_t>(boundaries_ + 8 * document);
}

void IndexedDataset::read(int64_t sequence, int64_t offset, int64_t count, int32_t* out) const {
  TROUPE_CHECK(sequence >= 0 && sequence < num_sequences_,
               fmt::format("sequence {} of {} in {}", sequence, num_sequences_, prefix_));
  TROUPE_CHECK(offset >= 0 && count >= 0 && count <= sequence_length(sequence) - offset,
               fmt::format("{} tokens at {} of sequence {} with {} in {}", count, offset, sequence,
                           sequence_length(sequence), prefix_));
  const unsigned char* from = bin_.data + sequence_start(sequence) + offset * size_of(type_);
  with_type(type_, [&](auto zero) {
    using Stored = decltype(zero);
    for (int64_t i = 0; i < count; ++i) {
      const auto token = load<Stored>(from + i * static_cast<int64_t>(sizeof(Stored)));
      if constexpr (sizeof(Stored) > sizeof(int32_t)) {
        if (!std::in_range<int32_t>(token)) {
          throw_failed(fmt::format("{}: token {} of sequence {} is {}, which is no 32-bit id",
                                   bin_path(prefix_), offset + i, sequence, token));
        }
      }
      // An i8 token is a number, not a character.
      out[i] = static_cast<int32_t>(token);  // NOLINT(bugprone-signed-char-misuse)
    }
  });
}

TokenRange IndexedDataset::token_range(int64_t stride) const {
  TokenRange range;
  with_type(type_, [&](auto zero) {
    using Stored = decltype(zero);
    for (int64_t sequence = 0; sequence < num_sequences_; sequence += stride) {
      const int64_t length = sequence_length(sequence);
      if (length == 0) continue;
      const unsigned char* from = bin_.data + sequence_start(sequence);
      Stored lowest = load<Stored>(from);
      Stored highest = lowest;
      for (int64_t i = 1; i < length; ++i) {
        const auto token = load<Stored>(from + i * static_cast<int64_t>(sizeof(Stored)));
        lowest = std::min(lowest, token);
        highest = std::max(highest, token);
      }
      range.lowest = std::min<int64_t>(range.lowest, lowest);
      range.highest = std::max<int64_t>(range.highest, highest);
    }
  });
  return range;
}

void require_vocabulary(const IndexedDataset& dataset, int64_t vocab_size,
                        std::string_view tokenizer) {
  constexpr int64_t kSequencesOfLarge = 1000;
  const bool is_large = static_cast<int64_t>(dataset.token_bytes().size()) > kCheckedWhole;
  const TokenRange range = dataset.token_range(
      is_large ? std::max<int64_t>(1, dataset.num_sequences() / kSequencesOfLarge) : 1);
  if (range.lowest > range.highest) return;
  if (range.lowest >= 0 && range.highest < vocab_size) return;
  throw_bad_request(fmt::format(
      "{} holds token ids from {} to {}, but the {} tokenizer has ids 0 to {}: the data "
      "was written with another tokenizer; tokenize the text again or name that one",
      bin_path(dataset.prefix()), range.lowest, range.highest, tokenizer, vocab_size - 1));
}

IndexedDatasetWriter::IndexedDatasetWriter(std::string prefix, TokenType type, bool overwrite)
    : prefix_(std::move(prefix)), type_(type) {
  const std::string name = std::filesystem::path(prefix_).filename().string();
  if (name.empty() || name == "." || name == "..") {
    throw_bad_request(
        fmt::format("output prefix '{}' has no file name; give for example FOLDER/train", prefix_));
  }
  std::error_code error;
  for (const std::string& path : {idx_path(prefix_), bin_path(prefix_)}) {
    if (!overwrite && std::filesystem::exists(path, error)) {
      throw_bad_request(
          fmt::format("{} exists already; remove it, overwrite it (--overwrite), or choose another "
                      "output prefix.",
                      path));
    }
  }
  std::filesystem::create_directories(folder_of(prefix_), error);
  if (error) throw_system("create folder", folder_of(prefix_), error.value());

  const std::string path = partial(bin_path(prefix_));
  bin_file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (bin_file_ < 0) throw_system("create", path, errno);
  // The lock keeps a second writer out. A writer that opened the file just before the first one
  // gave it its final name holds a lock on a finished data set: the path then names another file.
  struct stat opened {};
  struct stat named {};
  if (::flock(bin_file_, LOCK_EX | LOCK_NB) != 0 || ::fstat(bin_file_, &opened) != 0 ||
      ::stat(path.c_str(), &named) != 0 || opened.st_ino != named.st_ino) {
    ::close(bin_file_);
    throw_failed(
        fmt::format("{} is being written by another process; wait for it or choose "
                    "another output prefix",
                    path));
  }
  if (::ftruncate(bin_file_, 0) != 0) {
    const int reason = errno;
    discard();
    throw_system("empty", path, reason);
  }
  buffer_.reserve(2 * kBufferSize);  // what append() leaves, and one block more
}

IndexedDatasetWriter::~IndexedDatasetWriter() {
  discard();
}

void IndexedDatasetWriter::discard() {
  if (bin_file_ < 0) return;
  ::unlink(partial(bin_path(prefix_)).c_str());
  ::unlink(partial(idx_path(prefix_)).c_str());
  ::close(bin_file_);
  bin_file_ = -1;
}

void IndexedDatasetWriter::write_all(int file, const std::string& path, const char* data,
                                     size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(file, data, size);
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_system("write", path, errno);
    }
    data += written;
    size -= static_cast<size_t>(written);
  }
}

void IndexedDatasetWriter::flush() {
  write_all(bin_file_, partial(bin_path(prefix_)), buffer_.data(), buffer_.size());
  buffer_.clear();
}

void IndexedDatasetWriter::append(std::span<const int32_t> tokens) {
  const auto count = static_cast<int64_t>(tokens.size());
  with_type(type_, [&](auto zero) {
    using Stored = decltype(zero);
    while (!tokens.empty()) {
      const auto block = tokens.first(std::min(tokens.size(), kBufferSize / sizeof(Stored)));
      tokens = tokens.subspan(block.size());
      size_t at = buffer_.size();
      buffer_.resize(at + block.size() * sizeof(Stored));
      for (const int32_t token : block) {
        TROUPE_CHECK(std::in_range<Stored>(token),
                     fmt::format("token {} in a data set of {}", token, name_of(type_)));
        const auto stored = static_cast<Stored>(token);
        std::memcpy(buffer_.data() + at, &stored, sizeof(Stored));
        at += sizeof(Stored);
      }
      if (buffer_.size() >= kBufferSize) flush();
    }
  });
  sequence_tokens_ += count;
  num_tokens_ += count;
}

void IndexedDatasetWriter::end_sequence() {
  if (sequence_tokens_ > std::numeric_limits<int32_t>::max()) {
    throw_failed(
        fmt::format("sequence {} of {} has {} tokens, and the format holds 2,147,483,647 "
                    "at most; split the document",
                    lengths_.size(), prefix_, sequence_tokens_));
  }
  lengths_.push_back(static_cast<int32_t>(sequence_tokens_));
  sequence_tokens_ = 0;
}

void IndexedDatasetWriter::end_document() {
  TROUPE_CHECK(sequence_tokens_ == 0, "a document ends inside a sequence");
  boundaries_.push_back(static_cast<int64_t>(lengths_.size()));
}

void IndexedDatasetWriter::write_index() {
  const std::string path = partial(idx_path(prefix_));
  const File file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.get() < 0) throw_system("create", path, errno);

  std::vector<char> bytes;
  bytes.reserve(kBufferSize);
  const auto put = [&](const void* data, size_t size) {
    const auto* from = static_cast<const char*>(data);
    bytes.insert(bytes.end(), from, from + size);
    if (bytes.size() < kBufferSize) return;
    write_all(file.get(), path, bytes.data(), bytes.size());
    bytes.clear();
  };
  const auto put_value = [&](auto value) { put(&value, sizeof(value)); };

  put(kMagic, sizeof(kMagic));
  put_value(kVersion);
  put_value(static_cast<uint8_t>(type_));
  put_value(static_cast<uint64_t>(lengths_.size()));
  put_value(static_cast<uint64_t>(boundaries_.size()));
  put(lengths_.data(), lengths_.size() * sizeof(int32_t));
  int64_t start = 0;
  for (const int32_t length : lengths_) {
    put_value(start);
    start += length * size_of(type_);
  }
  put(boundaries_.data(), boundaries_.size() * sizeof(int64_t));
  write_all(file.get(), path, bytes.data(), bytes.size());
  if (::fsync(file.get()) != 0) throw_system("sync", path, errno);
}

void IndexedDatasetWriter::finish() {
  TROUPE_CHECK(sequence_tokens_ == 0, "finish() inside a sequence");
  TROUPE_CHECK(boundaries_.back() == static_cast<int64_t>(lengths_.size()),
               "finish() inside a document");
  flush();
  if (::fsync(bin_file_) != 0) throw_system("sync", partial(bin_path(prefix_)), errno);
  write_index();

  // A new .bin must never stand beside an old .idx, nor the other way round: the old index goes
  // first, for good, and the new one comes last.
  if (::unlink(idx_path(prefix_).c_str()) != 0 && errno != ENOENT) {
    throw_system("replace", idx_path(prefix_), errno);
  }
  sync_folder(prefix_);
  rename_file(partial(bin_path(prefix_)), bin_path(prefix_));
  sync_folder(prefix_);
  rename_file(partial(idx_path(prefix_)), idx_path(prefix_));
  sync_folder(prefix_);
  ::close(bin_file_);
  bin_file_ = -1;
}

}  // namespace troupe
