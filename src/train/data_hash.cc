#include "train/data_hash.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fmt/format.h>
#include <span>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>

#include "io/file.h"
#include "io/hash.h"

namespace troupe {
namespace {

constexpr size_t kBlocks = 256;
constexpr size_t kBlockBytes = 4096;
// Between two looks at whether to end.
constexpr size_t kChunkBytes = size_t{8} << 20;

void add_number(StreamingHash& hash, uint64_t number) {
  std::array<unsigned char, 8> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<unsigned char>(number >> 8 * i);
  }
  hash.update(bytes.data(), bytes.size());
}

// Blocks at even distances, the first and the last included; all of a small file.
void add_samples(StreamingHash& hash, std::span<const std::byte> file) {
  if (file.size() <= kBlocks * kBlockBytes) {
    hash.update(file.data(), file.size());
    return;
  }
  for (size_t i = 0; i < kBlocks; ++i) {
    hash.update(file.data() + i * (file.size() - kBlockBytes) / (kBlocks - 1), kBlockBytes);
  }
}

// Adds both files; false when `ends` was set before their end.
bool add_files(StreamingHash& hash, const IndexedDataset& set, const std::atomic<bool>* ends) {
  for (const std::span<const std::byte> file : {set.index_bytes(), set.token_bytes()}) {
    for (size_t begin = 0; begin < file.size(); begin += kChunkBytes) {
      if (ends != nullptr && ends->load(std::memory_order_relaxed)) return false;
      hash.update(file.data() + begin, std::min(kChunkBytes, file.size() - begin));
    }
  }
  return true;
}

}  // namespace

bool DataHash::differs(const DataHash& other) const {
  return bytes != other.bytes || sampled != other.sampled ||
         (full && other.full && *full != *other.full);
}

std::string DataHash::describe() const {
  return fmt::format("{} bytes, {}xxh3 {}", bytes, full ? "" : "sampled ",
                     hash_to_hex(full.value_or(sampled)));
}

uint64_t bytes_of(const IndexedDataset& set) {
  return set.index_bytes().size() + set.token_bytes().size();
}

DataHash sampled_hash(const IndexedDataset& set) {
  StreamingHash hash;
  for (const std::span<const std::byte> file : {set.index_bytes(), set.token_bytes()}) {
    add_number(hash, file.size());
    add_samples(hash, file);
  }
  return {.bytes = bytes_of(set), .sampled = hash.digest(), .full = {}};
}

uint64_t full_hash(const IndexedDataset& set) {
  StreamingHash hash;
  add_files(hash, set, nullptr);
  return hash.digest();
}

uint64_t sampled_weights_hash(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name == "config.json" || name.ends_with(".safetensors")) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  StreamingHash hash;
  for (const std::string& name : names) {
    const MappedFile file = MappedFile::open(join_path(folder, name));
    add_number(hash, file.bytes().size());
    hash.update(name.data(), name.size());
    add_samples(hash, file.bytes());
  }
  return hash.digest();
}

DataHasher::DataHasher(SharedDatasets sets, bool in_full, uint64_t at_once)
    : sets_(std::move(sets)) {
  uint64_t bytes = 0;
  for (const auto& set : sets_) {
    sampled_.push_back(sampled_hash(*set));
    bytes += sampled_.back().bytes;
  }
  if (!in_full) {
    done_ = true;
  } else if (bytes <= at_once) {
    for (const auto& set : sets_) full_.push_back(full_hash(*set));
    done_ = true;
  } else {
    thread_ = std::thread([this] { work(); });
  }
}

DataHasher::~DataHasher() {
  ends_ = true;
  if (thread_.joinable()) thread_.join();
}

void DataHasher::work() {
  // Of this thread alone: training comes first. Where that is not allowed, they share.
  [[maybe_unused]] const int refused =
      ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 19);
  std::vector<uint64_t> full;
  for (const auto& set : sets_) {
    StreamingHash hash;
    if (!add_files(hash, *set, &ends_)) return;
    full.push_back(hash.digest());
  }
  full_ = std::move(full);
  done_.store(true, std::memory_order_release);
}

std::vector<DataHash> DataHasher::hashes() const {
  std::vector<DataHash> hashes = sampled_;
  if (!is_done()) return hashes;
  for (size_t i = 0; i < full_.size(); ++i) hashes[i].full = full_[i];
  return hashes;
}

}  // namespace troupe
