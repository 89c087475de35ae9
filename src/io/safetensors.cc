#include "io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "io/json.h"

namespace troupe {
namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors are little endian and are mapped as they are");

constexpr size_t kLengthBytes = 8;
constexpr std::string_view kMetadataName = "__metadata__";
constexpr uint64_t kMaxFolderIndexBytes = uint64_t{1} << 30;
// A header's entry takes a few hundred bytes; this many stay far below the largest header.
constexpr size_t kMaxTensorsPerShard = 100'000;

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

// Bytes of a tensor, or nothing when the product of its extents overflows. The product is taken
// over the extents that are not zero, so that the answer does not depend on their order.
std::optional<uint64_t> checked_bytes(const std::vector<int64_t>& shape, FileDType dtype) {
  int64_t product = static_cast<int64_t>(size_of(dtype));
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, extent, &product)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : static_cast<uint64_t>(product);
}

std::string supported_dtypes() {
  std::string names;
  for (const FileDType dtype : kFileDTypes) {
    names += (names.empty() ? "" : ", ") + std::string(name_of(dtype));
  }
  return names;
}

// Receives the events of the JSON parser and accepts exactly the grammar of a header. It is a flat
// state machine: nesting that the format does not have is refused where it begins, so no depth of
// brackets costs memory.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::string& path, std::vector<TensorEntry>* entries,
               SafetensorsMetadata* metadata, std::unordered_map<std::string, size_t>* index)
      : path_(path), entries_(*entries), metadata_(*metadata), index_(*index) {}

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t) override {
    if (state_ == State::shape_extents) fail("has a negative extent in its shape");
    if (state_ == State::offset_numbers) fail("has a negative number in \"data_offsets\"");
    return unexpected("a negative number");
  }
  bool number_float(number_float_t, const string_t&) override {
    if (state_ == State::shape_extents) {
      fail("has an extent in its shape that is no integer of 63 bits");
    }
    if (state_ == State::offset_numbers) {
      fail("has a number in \"data_offsets\" that is no integer of 64 bits");
    }
    return unexpected("a number with a fraction");
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::shape_extents) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        fail("has an extent in its shape that is no integer of 63 bits");
      }
      if (entry_.shape.size() == kMaxFileRank) {
        fail("has more than " + std::to_string(kMaxFileRank) + " dimensions");
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (state_ == State::offset_numbers) {
      if (offsets_ == 2) fail("has more than two numbers in \"data_offsets\"");
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return unexpected("a number");
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool string(string_t& value) override {
    if (state_ == State::metadata_value) {
      metadata_.back().second = value;
      state_ = State::metadata_keys;
      return true;
    }
    if (state_ == State::dtype) {
      const auto* found = std::find_if(std::begin(kFileDTypes), std::end(kFileDTypes),
                                       [&](FileDType dtype) { return name_of(dtype) == value; });
      if (found == std::end(kFileDTypes)) {
        fail("has the dtype " + quote_name(value) + ", which is not supported (" +
             supported_dtypes() + ")");
      }
      entry_.dtype = *found;
      state_ = State::tensor_keys;
      return true;
    }
    return unexpected("a text");
  }

  bool start_object(size_t) override {
    switch (state_) {
      case State::start:
        state_ = State::names;
        return true;
      case State::metadata:
        state_ = State::metadata_keys;
        return true;
      case State::tensor:
        state_ = State::tensor_keys;
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool key(string_t& name) override {
    if (state_ == State::names) {
      if (name == kMetadataName) {
        if (seen_metadata_) {
          throw_failed(path_ + ": \"__metadata__\" is given twice in the header");
        }
        seen_metadata_ = true;
        state_ = State::metadata;
        return true;
      }
      entry_ = TensorEntry{};
      entry_.name = name;
      if (!index_.emplace(name, entries_.size()).second) fail("is given twice in the header");
      has_dtype_ = has_shape_ = has_offsets_ = false;
      state_ = State::tensor;
      return true;
    }
    if (state_ == State::metadata_keys) {
      if (!metadata_names_.insert(name).second) {
        throw_failed(path_ + ": " + quote_name(name) + " is given twice in \"__metadata__\"");
      }
      metadata_.emplace_back(name, "");
      state_ = State::metadata_value;
      return true;
    }
    if (name == "dtype") return begin_field(&has_dtype_, "dtype", State::dtype);
    if (name == "shape") return begin_field(&has_shape_, "shape", State::shape);
    if (name == "data_offsets") {
      return begin_field(&has_offsets_, "data_offsets", State::offsets);
    }
    fail("has a field " + quote_name(name) + " that the format does not know");
  }

  bool end_object() override {
    if (state_ == State::names) {
      state_ = State::end;
    } else if (state_ == State::metadata_keys) {
      state_ = State::names;
    } else {
      if (!has_dtype_) fail("has no \"dtype\"");
      if (!has_shape_) fail("has no \"shape\"");
      if (!has_offsets_) fail("has no \"data_offsets\"");
      entries_.push_back(std::move(entry_));
      state_ = State::names;
    }
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::shape) {
      state_ = State::shape_extents;
      return true;
    }
    if (state_ == State::offsets) {
      offsets_ = 0;
      state_ = State::offset_numbers;
      return true;
    }
    return unexpected("an array");
  }

  bool end_array() override {
    if (state_ == State::offset_numbers && offsets_ != 2) {
      fail("has fewer than two numbers in \"data_offsets\"");
    }
    state_ = State::tensor_keys;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    throw_failed(path_ + ": the header is not valid JSON at byte " + std::to_string(position));
  }

 private:
  enum class State {
    start,
    names,
    metadata,
    metadata_keys,
    metadata_value,
    tensor,
    tensor_keys,
    dtype,
    shape,
    shape_extents,
    offsets,
    offset_numbers,
    end,
  };

  [[noreturn]] void fail(const std::string& what) const {
    throw_failed(path_ + ": tensor " + quote_name(entry_.name) + " " + what);
  }

  bool begin_field(bool* seen, const char* name, State next) {
    if (*seen) fail(std::string("has \"") + name + "\" twice");
    *seen = true;
    state_ = next;
    return true;
  }

  bool unexpected(const char* what) const {
    const auto expected = [&]() -> std::string {
      switch (state_) {
        case State::start:
          return "an object at the top of the header";
        case State::metadata:
          return "an object under \"__metadata__\"";
        case State::metadata_value:
          return "a text under \"__metadata__\", " + quote_name(metadata_.back().first);
        case State::tensor:
          return "an object";
        case State::dtype:
          return "a text as \"dtype\"";
        case State::shape:
          return "an array as \"shape\"";
        case State::shape_extents:
          return "integers in \"shape\"";
        case State::offsets:
          return "an array as \"data_offsets\"";
        case State::offset_numbers:
          return "integers in \"data_offsets\"";
        default:
          return "the end of the header";
      }
    }();
    if (state_ == State::start || state_ == State::metadata || state_ == State::metadata_value ||
        state_ == State::end) {
      throw_failed(path_ + ": the header has " + what + " where the format has " + expected);
    }
    fail(std::string("has ") + what + " where the format has " + expected);
  }

  const std::string& path_;
  std::vector<TensorEntry>& entries_;
  SafetensorsMetadata& metadata_;
  std::unordered_map<std::string, size_t>& index_;
  std::set<std::string> metadata_names_;
  State state_ = State::start;
  TensorEntry entry_;
  int offsets_ = 0;
  bool seen_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
};

// Refuses entries whose byte ranges do not tile the data exactly. `entries` are sorted by range.
void check_ranges(const std::string& path, const std::vector<TensorEntry>& entries,
                  uint64_t data_bytes) {
  const TensorEntry* previous = nullptr;
  uint64_t covered = 0;
  for (const TensorEntry& entry : entries) {
    const std::string where = path + ": tensor " + quote_name(entry.name);
    const std::string range =
        "[" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + ")";
    if (entry.begin > entry.end) throw_failed(where + " ends before it begins: bytes " + range);
    if (entry.end > data_bytes) {
      throw_failed(where + " lies at bytes " + range + ", beyond the " +
                   std::to_string(data_bytes) + " bytes of data in the file (is it truncated?)");
    }
    const std::optional<uint64_t> expected = checked_bytes(entry.shape, entry.dtype);
    if (!expected) throw_failed(where + " has a shape whose size overflows 63 bits");
    if (*expected != entry.end - entry.begin) {
      throw_failed(where + " takes " + std::to_string(entry.end - entry.begin) +
                   " bytes, but its shape and dtype need " + std::to_string(*expected));
    }
    if (entry.begin < covered) {
      throw_failed(where + " at bytes " + range + " overlaps tensor " + quote_name(previous->name));
    }
    if (entry.begin > covered) {
      throw_failed(where + " at bytes " + range + " leaves a gap: the tensors before it end at " +
                   std::to_string(covered));
    }
    covered = entry.end;
    previous = &entry;
  }
  if (covered != data_bytes) {
    throw_failed(path + ": the file has " + std::to_string(data_bytes) +
                 " bytes of data, but its tensors take only " + std::to_string(covered));
  }
}

std::string header_text(const std::vector<TensorSpec>& tensors,
                        const SafetensorsMetadata& metadata) {
  const auto text = [](std::string_view value) { return nlohmann::json(value).dump(); };
  std::string header = "{";
  if (!metadata.empty()) {
    header += text(kMetadataName) + ":{";
    for (const auto& [name, value] : metadata) {
      if (header.back() != '{') header += ',';
      header += text(name) + ":" + text(value);
    }
    header += '}';
  }
  uint64_t begin = 0;
  for (const TensorSpec& tensor : tensors) {
    if (header.back() != '{') header += ',';
    header += text(tensor.name) + ":{\"dtype\":\"" + std::string(name_of(tensor.dtype)) +
              "\",\"shape\":[";
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      header += (i == 0 ? "" : ",") + std::to_string(tensor.shape[i]);
    }
    const uint64_t end = begin + bytes_of(tensor);
    header += "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
    begin = end;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

std::string shard_name(size_t shard, size_t shards) {
  if (shards == 1) return kSingleName;
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, shards);
  return name;
}

}  // namespace

int64_t elements_of(const TensorSpec& tensor) {
  return static_cast<int64_t>(bytes_of(tensor) / size_of(tensor.dtype));
}

uint64_t bytes_of(const TensorSpec& tensor) {
  const std::optional<uint64_t> bytes = checked_bytes(tensor.shape, tensor.dtype);
  TROUPE_CHECK(bytes.has_value(), "tensor " + tensor.name + " is too large to address");
  return *bytes;
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  SafetensorsFile result(MappedFile::open(path));
  const std::span<const std::byte> bytes = result.file_.bytes();
  if (bytes.size() < kLengthBytes) {
    throw_failed(path + ": is only " + std::to_string(bytes.size()) +
                 " bytes long, too short for a safetensors file");
  }
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kMaxSafetensorsHeaderBytes) {
    throw_failed(path + ": its header would be " + std::to_string(length) +
                 " bytes long, more than the format allows (" +
                 std::to_string(kMaxSafetensorsHeaderBytes) + "); is this a safetensors file?");
  }
  if (length > bytes.size() - kLengthBytes) {
    throw_failed(path + ": its header of " + std::to_string(length) +
                 " bytes reaches beyond the end of the file (is it truncated?)");
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  if (length == 0 || *text != '{') throw_failed(path + ": the header does not begin with '{'");
  HeaderReader reader(result.file_.path(), &result.entries_, &result.metadata_, &result.index_);
  nlohmann::json::sax_parse(text, text + length, &reader);
  result.header_bytes_ = kLengthBytes + length;

  std::vector<TensorEntry>& entries = result.entries_;
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_ranges(path, entries, bytes.size() - result.header_bytes_);
  for (size_t i = 0; i < entries.size(); ++i) result.index_[entries[i].name] = i;
  return result;
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  return found == index_.end() ? nullptr : &entries_[found->second];
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
  return file_.bytes().subspan(header_bytes_ + entry.begin, entry.end - entry.begin);
}

SafetensorsWriter::SafetensorsWriter(const Disk& disk, std::string path,
                                     std::vector<TensorSpec> tensors,
                                     const SafetensorsMetadata& metadata)
    : tensors_(std::move(tensors)), file_(disk, std::move(path)) {
  std::set<std::string_view> names = {kMetadataName};
  uint64_t data_bytes = 0;
  for (const TensorSpec& tensor : tensors_) {
    TROUPE_CHECK(names.insert(tensor.name).second,
                 file_.path() + ": tensor " + tensor.name + " is given twice");
    TROUPE_CHECK(tensor.shape.size() <= kMaxFileRank &&
                     std::all_of(tensor.shape.begin(), tensor.shape.end(),
                                 [](int64_t extent) { return extent >= 0; }),
                 file_.path() + ": tensor " + tensor.name + " has no valid shape");
    data_bytes += bytes_of(tensor);
  }
  const std::string text = header_text(tensors_, metadata);
  TROUPE_CHECK(text.size() <= kMaxSafetensorsHeaderBytes, file_.path() + ": too many tensors");
  std::string header(kLengthBytes, '\0');
  const uint64_t length = text.size();
  std::memcpy(header.data(), &length, sizeof length);
  header += text;
  header_hash_ = hash_bytes(header.data(), header.size());
  file_bytes_ = header.size() + data_bytes;
  file_.write(header.data(), header.size());
  complete_tensors();
}

void SafetensorsWriter::append(size_t tensor, std::span<const std::byte> piece) {
  if (piece.empty()) return;
  TROUPE_CHECK(tensor == tensor_hashes_.size() && tensor < tensors_.size(),
               file_.path() + ": tensors must be written in the order announced");
  TROUPE_CHECK(piece.size() <= bytes_of(tensors_[tensor]) - written_,
               file_.path() + ": too many bytes for tensor " + tensors_[tensor].name);
  file_.write(piece.data(), piece.size());
  hash_.update(piece.data(), piece.size());
  written_ += piece.size();
  complete_tensors();
}

// Moves on over every tensor that has all its bytes; empty ones have them from the start.
void SafetensorsWriter::complete_tensors() {
  while (tensor_hashes_.size() < tensors_.size() &&
         written_ == bytes_of(tensors_[tensor_hashes_.size()])) {
    tensor_hashes_.push_back(hash_.digest());
    hash_.reset();
    written_ = 0;
  }
}

void SafetensorsWriter::finish() {
  TROUPE_CHECK(tensor_hashes_.size() == tensors_.size(),
               file_.path() + ": not all bytes of tensor " + tensors_[tensor_hashes_.size()].name +
                   " were written");
  file_.sync_and_close();
}

SafetensorsFolder SafetensorsFolder::open(const std::string& folder) {
  SafetensorsFolder result;
  result.path_ = folder;
  const std::string single = join_path(folder, kSingleName);
  const std::string index_path = join_path(folder, kIndexName);
  const bool has_single = path_exists(single);
  const bool has_index = path_exists(index_path);
  if (has_single == has_index) {
    throw_bad_request(folder + (has_single ? ": holds both " : ": holds neither ") + kSingleName +
                      (has_single ? " and " : " nor ") + kIndexName +
                      (has_single ? "; remove the one that is not meant"
                                  : "; give a Hugging Face model folder with safetensors files"));
  }
  if (has_single) {
    result.files_.push_back(SafetensorsFile::open(single));
    for (const TensorEntry& entry : result.files_[0].entries()) {
      result.file_of_name_.emplace(entry.name, 0);
    }
    return result;
  }

  constexpr int kMaxFolderIndexDepth = 16;
  const nlohmann::json index =
      parse_json(read_file(index_path, kMaxFolderIndexBytes), index_path, kMaxFolderIndexDepth);
  const auto weight_map = index.is_object() ? index.find("weight_map") : index.end();
  if (weight_map == index.end() || !weight_map->is_object()) {
    throw_failed(index_path + ": has no object \"weight_map\"");
  }
  std::map<std::string, std::vector<std::string>> names_of_file;
  for (const auto& [name, file] : weight_map->items()) {
    if (!file.is_string()) {
      throw_failed(index_path + ": tensor " + quote_name(name) + " names no file");
    }
    const auto file_name = file.get<std::string>();
    // A plain name: the index must not reach outside its folder. Messages will show it.
    if (file_name.empty() || file_name == "." || file_name == ".." ||
        file_name.find('/') != std::string::npos || printable(file_name) != file_name) {
      throw_failed(index_path + ": tensor " + quote_name(name) + " names the file " +
                   quote_name(file_name) + ", which is not a plain file name");
    }
    names_of_file[file_name].push_back(name);
  }
  for (const auto& [file_name, names] : names_of_file) {
    const std::string path = join_path(folder, file_name);
    if (!path_exists(path)) {
      throw_failed(path + ": No such file, but " + index_path + " places tensor " +
                   quote_name(names.front()) + " in it");
    }
    const SafetensorsFile& file = result.files_.emplace_back(SafetensorsFile::open(path));
    for (const std::string& name : names) {
      if (file.find(name) == nullptr) {
        throw_failed(file.path() + ": tensor " + quote_name(name) + " is missing, but " +
                     index_path + " says that it is here");
      }
      result.file_of_name_.emplace(name, result.files_.size() - 1);
    }
    for (const TensorEntry& entry : file.entries()) {
      // The names of an object come sorted.
      if (!std::binary_search(names.begin(), names.end(), entry.name)) {
        throw_failed(file.path() + ": tensor " + quote_name(entry.name) + " is here, but " +
                     index_path + " does not say so");
      }
    }
  }
  return result;
}

SafetensorsFolder::Located SafetensorsFolder::find(std::string_view name) const {
  const auto found = file_of_name_.find(std::string(name));
  if (found == file_of_name_.end()) return {};
  const SafetensorsFile& file = files_[found->second];
  return {&file, file.find(name)};
}

SafetensorsFolderWriter::SafetensorsFolderWriter(const Disk& disk, std::string folder,
                                                 std::vector<TensorSpec> tensors,
                                                 uint64_t max_shard_bytes)
    : disk_(disk), folder_(std::move(folder)), tensors_(std::move(tensors)) {
  for (const char* name : {kSingleName, kIndexName}) {
    if (path_exists(join_path(folder_, name))) {
      throw_bad_request(folder_ + ": already holds a model (" + name +
                        "); give a new folder or remove it");
    }
  }
  made_folder_ = !path_exists(folder_);
  disk_.make_directories(folder_);
  std::vector<uint64_t> sizes;
  for (const TensorSpec& tensor : tensors_) sizes.push_back(bytes_of(tensor));
  first_tensor_ = split_into_shards(sizes, max_shard_bytes, kMaxTensorsPerShard);
  open_shard(0);
}

SafetensorsFolderWriter::~SafetensorsFolderWriter() {
  std::error_code error;
  for (const std::string& path : temporary_) std::filesystem::remove(path, error);
  if (made_folder_) std::filesystem::remove(folder_, error);  // only when it is empty
}

void SafetensorsFolderWriter::open_shard(size_t shard) {
  const auto begin = tensors_.begin() + static_cast<std::ptrdiff_t>(first_tensor_[shard]);
  const auto end = tensors_.begin() + static_cast<std::ptrdiff_t>(first_tensor_[shard + 1]);
  temporary_.push_back(join_path(folder_, shard_name(shard, first_tensor_.size() - 1) + ".tmp"));
  writer_ = std::make_unique<SafetensorsWriter>(disk_, temporary_.back(),
                                                std::vector<TensorSpec>(begin, end));
  next_shard_ = shard + 1;
}

void SafetensorsFolderWriter::append(size_t tensor, std::span<const std::byte> piece) {
  while (next_shard_ + 1 < first_tensor_.size() && tensor >= first_tensor_[next_shard_]) {
    writer_->finish();
    open_shard(next_shard_);
  }
  writer_->append(tensor - first_tensor_[next_shard_ - 1], piece);
}

void SafetensorsFolderWriter::finish() {
  writer_->finish();
  // Only tensors without bytes can be left, when nothing was appended for them.
  while (next_shard_ + 1 < first_tensor_.size()) {
    open_shard(next_shard_);
    writer_->finish();
  }
  const size_t shards = first_tensor_.size() - 1;
  std::vector<std::string> names;
  for (size_t shard = 0; shard < shards; ++shard) names.push_back(shard_name(shard, shards));
  if (shards > 1) {
    nlohmann::json weight_map = nlohmann::json::object();
    uint64_t total = 0;
    for (size_t shard = 0; shard < shards; ++shard) {
      for (size_t i = first_tensor_[shard]; i < first_tensor_[shard + 1]; ++i) {
        weight_map[tensors_[i].name] = names[shard];
        total += bytes_of(tensors_[i]);
      }
    }
    const nlohmann::json index = {{"metadata", {{"total_size", total}}},
                                  {"weight_map", std::move(weight_map)}};
    names.emplace_back(kIndexName);
    temporary_.push_back(join_path(folder_, std::string(kIndexName) + ".tmp"));
    disk_.write_file(temporary_.back(), index.dump(2) + "\n");
  }
  for (size_t i = 0; i < names.size(); ++i) {
    // The name that makes a reader take the folder for a model comes after all else is durable.
    if (i + 1 == names.size()) disk_.sync_directory(folder_);
    disk_.rename(temporary_[i], join_path(folder_, names[i]));
  }
  temporary_.clear();
  made_folder_ = false;
  disk_.sync_directory(folder_);
}

std::vector<size_t> split_into_shards(std::span<const uint64_t> sizes, uint64_t max_bytes,
                                      size_t max_tensors) {
  std::vector<size_t> first = {0};
  uint64_t bytes = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > first.back() &&
        (sizes[i] > max_bytes || bytes > max_bytes - sizes[i] || i - first.back() >= max_tensors)) {
      first.push_back(i);
      bytes = 0;
    }
    bytes += sizes[i];
  }
  first.push_back(sizes.size());
  return first;
}

}  // namespace troupe
