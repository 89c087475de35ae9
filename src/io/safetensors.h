// safetensors files, and folders of them as Hugging Face lays them out.
//
// A safetensors file is: 8 bytes, the length N of the header (little endian); N bytes of JSON,
//   {"__metadata__": {"format": "pt"}, "name": {"dtype": "F32", "shape": [2, 3],
//    "data_offsets": [begin, end]}, ...}, padded with spaces; then the tensors' bytes, row-major
//    and
// little endian, without gaps. Offsets count from the first byte after the header.
//
// Readers trust nothing: whatever a file holds, opening it either yields tensors that lie within
// the file, do not overlap, leave no byte unused and have the size that their shape and dtype say,
// or throws a UserError (exit status 1) naming the file and the tensor. Readers map files (see
// MappedFile for the one thing that they cannot guard against) and may be used from any thread at
// once. A writer belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/file_dtype.h"
#include "io/hash.h"

namespace troupe {

// The largest header that the format allows, in bytes.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// The most dimensions that a tensor in a file may have.
inline constexpr size_t kMaxFileRank = 8;

// What a tensor is, without its bytes. Extents are >= 0; no extents mean a scalar.
struct TensorSpec {
  std::string name;
  FileDType dtype = FileDType::f32;
  std::vector<int64_t> shape;

  bool operator==(const TensorSpec& other) const = default;
};

// The number of elements, and of bytes, of a tensor. Read files guarantee that both fit.
int64_t elements_of(const TensorSpec& tensor);
uint64_t bytes_of(const TensorSpec& tensor);

// A tensor of an open file: where its bytes lie, from the first byte after the header.
struct TensorEntry : TensorSpec {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The texts under "__metadata__", in the file's order.
using SafetensorsMetadata = std::vector<std::pair<std::string, std::string>>;

class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  const std::string& path() const { return file_.path(); }
  const SafetensorsMetadata& metadata() const { return metadata_; }
  // In the order of their bytes in the file.
  const std::vector<TensorEntry>& entries() const { return entries_; }
  // The entry of that name, or nullptr. Entries live as long as this file is not moved from.
  const TensorEntry* find(std::string_view name) const;
  // The tensor's bytes, of an entry of this file; not necessarily aligned to its element type.
  std::span<const std::byte> bytes(const TensorEntry& entry) const;
  // As MappedFile::forget.
  void forget(const TensorEntry& entry) const { file_.forget(bytes(entry)); }
  // The length field and the header text, padding included.
  std::span<const std::byte> header() const { return file_.bytes().first(header_bytes_); }
  uint64_t file_bytes() const { return file_.bytes().size(); }

 private:
  explicit SafetensorsFile(MappedFile file) : file_(std::move(file)) {}
  MappedFile file_;
  size_t header_bytes_ = 0;
  SafetensorsMetadata metadata_;
  std::vector<TensorEntry> entries_;
  std::unordered_map<std::string, size_t> index_;
};

// Writes one file in a single pass, holding no tensor: the header is written by the constructor,
// then the bytes of the tensors follow in the order of `tensors`, each in as many pieces as the
// caller likes. Writing the entries and the metadata of a Hugging Face file back gives the same
// bytes.
class SafetensorsWriter {
 public:
  // Names must be distinct, valid UTF-8, and not "__metadata__". Empty metadata writes none. The
  // header must stay within kMaxSafetensorsHeaderBytes. `disk` must outlive the writer.
  SafetensorsWriter(const Disk& disk, std::string path, std::vector<TensorSpec> tensors,
                    const SafetensorsMetadata& metadata = {{"format", "pt"}});

  // Adds the next piece of tensor number `tensor`. All earlier tensors must be complete, and the
  // piece must not run over the end of this one.
  void append(size_t tensor, std::span<const std::byte> piece);

  // All tensors must be complete. Makes the file durable; its name becomes so with sync_directory.
  void finish();

  // Known after construction.
  uint64_t header_hash() const { return header_hash_; }
  uint64_t file_bytes() const { return file_bytes_; }
  // XXH3-64 of each tensor's bytes, in the order given; complete after finish().
  const std::vector<uint64_t>& tensor_hashes() const { return tensor_hashes_; }

 private:
  void complete_tensors();

  std::vector<TensorSpec> tensors_;
  OutputFile file_;
  uint64_t header_hash_ = 0;
  uint64_t file_bytes_ = 0;
  std::vector<uint64_t> tensor_hashes_;
  StreamingHash hash_;
  uint64_t written_ =
      0;  // bytes of the tensor being written, which is number tensor_hashes_.size()
};

// A Hugging Face model folder: `model.safetensors`, or `model.safetensors.index.json` with the
// shards that it names. Opening checks that the index and the shards agree on every name.
class SafetensorsFolder {
 public:
  struct Located {
    const SafetensorsFile* file = nullptr;
    const TensorEntry* entry = nullptr;
    std::span<const std::byte> bytes() const { return file->bytes(*entry); }
    void forget() const { file->forget(*entry); }
  };

  // A folder with neither file, or with both, is a bad request (exit status 2).
  static SafetensorsFolder open(const std::string& folder);

  const std::string& path() const { return path_; }
  // In the order of the shards' file names; every tensor is an entry of exactly one of them.
  const std::vector<SafetensorsFile>& files() const { return files_; }
  // Both pointers are nullptr when there is no such tensor.
  Located find(std::string_view name) const;

 private:
  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::unordered_map<std::string, size_t> file_of_name_;
};

// Writes such a folder. Tensors are put into shards in the order given, a new shard being started
// where the next tensor would exceed `max_shard_bytes` of tensor data; one shard is named
// `model.safetensors`, several `model-00001-of-000NN.safetensors` with an index. Files carry the
// suffix ".tmp" until finish() renames them, the index last, so an unfinished folder is never taken
// for a model.
class SafetensorsFolderWriter {
 public:
  // Creates the folder if needed. A folder that already holds a model is a bad request. `disk` must
  // outlive the writer.
  SafetensorsFolderWriter(const Disk& disk, std::string folder, std::vector<TensorSpec> tensors,
                          uint64_t max_shard_bytes);
  // Removes what an unfinished writer has written, and the folder if it has made it.
  ~SafetensorsFolderWriter();
  SafetensorsFolderWriter(const SafetensorsFolderWriter&) = delete;
  SafetensorsFolderWriter& operator=(const SafetensorsFolderWriter&) = delete;

  // As SafetensorsWriter::append, with numbers counting over all shards.
  void append(size_t tensor, std::span<const std::byte> piece);
  void finish();

 private:
  void open_shard(size_t shard);

  const Disk& disk_;
  std::string folder_;
  bool made_folder_ = false;  // and is not finished
  std::vector<TensorSpec> tensors_;
  std::vector<size_t> first_tensor_;  // of each shard, and one past the last tensor
  std::vector<std::string> temporary_;
  std::unique_ptr<SafetensorsWriter> writer_;
  size_t next_shard_ = 0;  // the shard that `writer_` writes is the one before
};

// The first tensor of each shard when tensors of these sizes, in bytes, are put into shards of at
// most `max_bytes` and `max_tensors` in order (a larger tensor gets a shard of its own), and at the
// end the number of tensors. One empty shard for no tensors.
std::vector<size_t> split_into_shards(std::span<const uint64_t> sizes, uint64_t max_bytes,
                                      size_t max_tensors);

}  // namespace troupe
