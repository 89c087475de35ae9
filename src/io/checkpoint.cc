#include "io/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <unistd.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/hash.h"
#include "io/safetensors.h"

namespace troupe {
namespace {

constexpr const char* kIndexFile = "index.json";
constexpr const char* kCommitFile = "COMMIT";
constexpr std::string_view kBestLink = "best";
constexpr std::string_view kStepPrefix = "step_";
constexpr std::string_view kReplacedPrefix = ".old_";
constexpr std::string_view kTemporaryPrefix = ".tmp_";
constexpr uint64_t kMaxIndexBytes = uint64_t{1} << 30;
constexpr uint64_t kMaxCommitBytes = 64;
// A header's entry takes a few hundred bytes; this many stay far below the largest header.
constexpr size_t kMaxSlicesPerShard = 100'000;

std::string checkpoints_folder(const std::string& dir) {
  return join_path(dir, "checkpoints");
}

std::string step_name(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step_%08lld", static_cast<long long>(step));
  return name;
}

// The step of a folder name that step_name produces.
std::optional<int64_t> parse_step_name(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kStepPrefix.size());
  int64_t step = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || step < 0 || step_name(step) != name) return std::nullopt;
  return step;
}

std::string temporary_name(std::string_view name, uint64_t id) {
  return std::string(kTemporaryPrefix) + std::string(name) + "_" + std::to_string(id);
}

// Of what this process alone works on.
std::string temporary_name(std::string_view name) {
  return temporary_name(name, static_cast<uint64_t>(::getpid()));
}

// What rank `rank` has written, until the save is committed.
std::string part_file(int32_t rank) {
  char name[32];
  std::snprintf(name, sizeof name, "part_%05d.json", rank);
  return name;
}

// Sorted names of the folder's entries; none when there is no such folder.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  if (error == std::errc::not_a_directory) {
    throw_bad_request(parent_path(folder) + " is a file, not the folder of a run.");
  }
  while (!error && entry != std::filesystem::directory_iterator()) {
    names.push_back(entry->path().filename().string());
    entry.increment(error);
  }
  if (error) throw_failed(folder + ": cannot list this directory: " + error.message());
  std::sort(names.begin(), names.end());
  return names;
}

// Reads the index of a checkpoint, provided that it was committed, and checks the shards' sizes.
CheckpointIndex read_committed_index(const std::string& path, uint64_t* hash = nullptr) {
  const std::string commit_path = join_path(path, kCommitFile);
  const std::string index_path = join_path(path, kIndexFile);
  if (!path_exists(commit_path)) {
    throw_failed(path + ": is not a complete checkpoint: it has no file " + kCommitFile);
  }
  const std::string commit = read_file(commit_path, kMaxCommitBytes);
  const std::string text = read_file(index_path, kMaxIndexBytes);
  const uint64_t found = hash_bytes(text.data(), text.size());
  if (commit != hash_to_hex(found) + "\n") {
    throw_failed(index_path + " is damaged: its hash is not the one in " + kCommitFile);
  }
  if (hash != nullptr) *hash = found;
  CheckpointIndex index = parse_checkpoint_index(text, index_path);
  for (const StoredShard& shard : index.shards) {
    const std::string shard_path = join_path(path, shard.file);
    const uint64_t bytes = file_size(shard_path);
    if (bytes != shard.bytes) {
      throw_failed(shard_path + " is damaged: it is " + std::to_string(bytes) +
                   " bytes long, but " + std::to_string(shard.bytes) + " were saved");
    }
  }
  return index;
}

// Why the folder does not count as the checkpoint of this step; empty when it does.
std::string incompleteness(const std::string& path, int64_t step) {
  try {
    const CheckpointIndex index = read_committed_index(path);
    if (index.step == step) return "";
    return path + ": its index is that of step " + std::to_string(index.step);
  } catch (const UserError& error) {
    return error.what();
  }
}

// Deletes a folder below `folder` under a name that is never taken for a checkpoint.
void discard(const Disk& disk, const std::string& folder, const std::string& name) {
  const std::string doomed =
      join_path(folder, temporary_name("discard_" + name.substr(name[0] == '.' ? 1 : 0)));
  disk.rename(join_path(folder, name), doomed);
  disk.sync_directory(folder);
  disk.remove_tree(doomed);
}

// Puts the folder in order after a process has died in the middle of a save or a deletion.
void recover(const Disk& disk, const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    if (name.starts_with(kTemporaryPrefix)) {
      disk.remove_tree(join_path(folder, name));
      continue;
    }
    if (!name.starts_with(kReplacedPrefix)) continue;
    const std::string original = name.substr(kReplacedPrefix.size());
    const std::optional<int64_t> step = parse_step_name(original);
    if (!step) continue;
    const std::string original_path = join_path(folder, original);
    if (path_exists(original_path) && incompleteness(original_path, *step).empty()) {
      discard(disk, folder, name);
    } else if (incompleteness(join_path(folder, name), *step).empty()) {
      if (path_exists(original_path)) discard(disk, folder, original);
      disk.rename(join_path(folder, name), original_path);
      disk.sync_directory(folder);
    }
  }
}

// Logical tensors by name, in the order in which they first occur.
class TensorList {
 public:
  // The tensor of that name, which is added without slices if it is new.
  StoredTensor& add(const std::string& name, CheckpointRole role, DType dtype, const Shape& shape) {
    const auto [found, inserted] = index_.emplace(name, tensors_.size());
    if (inserted) {
      TROUPE_CHECK(name.find('@') == std::string::npos,
                   "tensor " + name + ": names must not contain '@'");
      tensors_.push_back({name, role, dtype, shape, {}});
    }
    StoredTensor& tensor = tensors_[found->second];
    TROUPE_CHECK(tensor.role == role && tensor.dtype == dtype && tensor.shape == shape,
                 "slices of tensor " + name + " disagree about what it is");
    return tensor;
  }
  StoredTensor& add(const SliceToSave& slice) {
    return add(slice.name, slice.role, slice.dtype, slice.global_shape);
  }

  // Every tensor must be covered exactly.
  void check_tiling() const {
    for (const StoredTensor& tensor : tensors_) {
      std::vector<Box> boxes;
      for (const StoredSlice& slice : tensor.slices) boxes.push_back(slice.box);
      const std::string fault = tiling_fault(tensor.shape, boxes);
      TROUPE_CHECK(fault.empty(), "tensor " + tensor.name + " " + fault);
    }
  }

  std::vector<StoredTensor> take() { return std::move(tensors_); }

 private:
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string, size_t> index_;
};

size_t bytes_of(const SliceToSave& slice) {
  return static_cast<size_t>(slice.box.shape.elements()) * size_of(slice.dtype);
}

// A slice's tensor in the shard: the tensor's own name, and where the slice begins unless it is the
// whole tensor ("w@128,0").
TensorSpec spec_in_shard(const SliceToSave& slice) {
  TensorSpec spec{slice.name, to_file_dtype(slice.dtype), {}};
  const bool whole = slice.box.shape == slice.global_shape;
  for (int i = 0; i < slice.box.shape.rank(); ++i) {
    spec.shape.push_back(slice.box.shape[i]);
    if (whole) continue;
    spec.name += i == 0 ? '@' : ',';
    spec.name += std::to_string(slice.box.offset[static_cast<size_t>(i)]);
  }
  return spec;
}

// Writes a rank's shards into `path` and makes them durable.
CheckpointIndex write_shards(const Disk& disk, const std::string& path, int32_t rank,
                             std::span<const SliceToSave> all, uint64_t max_shard_bytes) {
  TensorList tensors;
  std::vector<const SliceToSave*> slices;
  std::vector<uint64_t> sizes;
  for (const SliceToSave& slice : all) {
    tensors.add(slice);
    if (bytes_of(slice) == 0) continue;
    slices.push_back(&slice);
    sizes.push_back(bytes_of(slice));
  }
  CheckpointIndex part;
  part.training = "{}";
  const std::vector<size_t> first = split_into_shards(sizes, max_shard_bytes, kMaxSlicesPerShard);
  for (size_t shard = 0; shard + 1 < first.size() && !slices.empty(); ++shard) {
    char file[48];
    std::snprintf(file, sizeof file, "shard_%05d_%05zu.safetensors", rank, shard);
    const std::span in_shard(slices.data() + first[shard], first[shard + 1] - first[shard]);
    std::vector<TensorSpec> specs;
    for (const SliceToSave* slice : in_shard) specs.push_back(spec_in_shard(*slice));
    SafetensorsWriter writer(disk, join_path(path, file), specs);
    for (size_t i = 0; i < in_shard.size(); ++i) {
      writer.append(i, {static_cast<const std::byte*>(in_shard[i]->data), bytes_of(*in_shard[i])});
    }
    writer.finish();
    part.shards.push_back({file, writer.file_bytes(), writer.header_hash()});
    for (size_t i = 0; i < in_shard.size(); ++i) {
      tensors.add(*in_shard[i])
          .slices.push_back({file, specs[i].name, in_shard[i]->box, writer.tensor_hashes()[i]});
    }
  }
  part.tensors = tensors.take();
  return part;
}

// Puts what all ranks have written into one index.
CheckpointIndex join_parts(const std::string& path, int32_t ranks) {
  CheckpointIndex index;
  TensorList tensors;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const std::string file = join_path(path, part_file(rank));
    CheckpointIndex part = parse_checkpoint_part(read_file(file, kMaxIndexBytes), file);
    for (StoredShard& shard : part.shards) index.shards.push_back(std::move(shard));
    for (StoredTensor& tensor : part.tensors) {
      auto& slices = tensors.add(tensor.name, tensor.role, tensor.dtype, tensor.shape).slices;
      slices.insert(slices.end(), std::make_move_iterator(tensor.slices.begin()),
                    std::make_move_iterator(tensor.slices.end()));
    }
  }
  tensors.check_tiling();
  index.tensors = tensors.take();
  return index;
}

// Best effort after a failure, without the hook: what cannot be undone now is undone by recover().
void undo(const std::string& temporary, const std::string& replaced, const std::string& final) {
  std::error_code error;
  if (path_exists(replaced) && !path_exists(final)) std::filesystem::rename(replaced, final, error);
  std::filesystem::remove_all(temporary, error);
}

// Copies the box `common`, which lies within both others, from a buffer that holds `from` to one
// that holds `to`. Returns the number of bytes copied.
size_t copy_box(const Box& common, const Box& from, const std::byte* source, const Box& to,
                std::byte* target, size_t element_bytes) {
  const int rank = common.shape.rank();
  // Trailing dimensions that both buffers hold in full and that are wanted in full are one run.
  int inner = rank;
  size_t run = element_bytes;
  while (inner > 0) {
    --inner;
    run *= static_cast<size_t>(common.shape[inner]);
    if (common.shape[inner] != from.shape[inner] || common.shape[inner] != to.shape[inner]) break;
  }
  // The runs are counted by the dimensions before `inner`; position of an index in a buffer:
  const auto position = [&](const Box& box, const std::array<int64_t, Shape::kMaxRank>& index) {
    int64_t linear = 0;
    for (int i = 0; i < rank; ++i) {
      const auto d = static_cast<size_t>(i);
      linear = linear * box.shape[i] + (index[d] - box.offset[d]);
    }
    return static_cast<size_t>(linear) * element_bytes;
  };
  std::array<int64_t, Shape::kMaxRank> index = common.offset;
  size_t copied = 0;
  while (true) {
    std::memcpy(target + position(to, index), source + position(from, index), run);
    copied += run;
    int i = inner - 1;
    for (; i >= 0; --i) {
      const auto d = static_cast<size_t>(i);
      if (++index[d] < common.offset[d] + common.shape[i]) break;
      index[d] = common.offset[d];
    }
    if (i < 0) return copied;
  }
}

// Collects names for a message and prints the first few.
class NameList {
 public:
  void add(const std::string& text) {
    if (count_++ < kPrinted) text_ += (text_.empty() ? "" : ", ") + text;
  }
  std::string sentence(const std::string& introduction) const {
    if (count_ == 0) return "";
    const std::string more =
        count_ > kPrinted ? " and " + std::to_string(count_ - kPrinted) + " more" : "";
    return "\n  " + introduction + ": " + text_ + more;
  }
  bool empty() const { return count_ == 0; }

 private:
  static constexpr size_t kPrinted = 8;
  size_t count_ = 0;
  std::string text_;
};

std::string description(CheckpointRole role, DType dtype, const Shape& shape) {
  return std::string(name_of(role)) + " " + std::string(name_of(dtype)) + shape.to_string();
}

// Refuses to load when the request and the checkpoint do not fit each other, naming all tensors
// that are at fault. `unexpected`: those that no slice asks for.
void check_request(const Checkpoint& checkpoint, std::span<const SliceToLoad> slices,
                   const NameList& unexpected) {
  NameList missing;
  NameList different;
  std::unordered_set<std::string_view> reported;
  for (const SliceToLoad& slice : slices) {
    const StoredTensor* const found = checkpoint.find(slice.name);
    if (found == nullptr) {
      if (reported.insert(slice.name).second) missing.add(quote_name(slice.name));
      continue;
    }
    const StoredTensor& tensor = *found;
    if (tensor.role != slice.role || tensor.dtype != slice.dtype ||
        !(tensor.shape == slice.global_shape)) {
      if (reported.insert(slice.name).second) {
        different.add(quote_name(slice.name) + " (" +
                      description(tensor.role, tensor.dtype, tensor.shape) + " saved, " +
                      description(slice.role, slice.dtype, slice.global_shape) + " expected)");
      }
      continue;
    }
    bool inside = slice.box.shape.rank() == tensor.shape.rank();
    for (int i = 0; inside && i < tensor.shape.rank(); ++i) {
      const int64_t offset = slice.box.offset[static_cast<size_t>(i)];
      inside = offset >= 0 && offset <= tensor.shape[i] - slice.box.shape[i];
    }
    TROUPE_CHECK(inside, "a requested slice reaches out of tensor " + slice.name);
  }
  if (missing.empty() && unexpected.empty() && different.empty()) return;
  throw_bad_request(checkpoint.path() +
                    ": this checkpoint does not fit what is to be loaded; use the model and "
                    "optimizer options that it was saved with" +
                    missing.sentence("missing from the checkpoint") +
                    unexpected.sentence("in the checkpoint but not expected") +
                    different.sentence("different"));
}

}  // namespace

CheckpointWriter::CheckpointWriter(const std::string& dir, int64_t step, uint64_t save_id,
                                   CheckpointOptions options)
    : step_(step),
      options_(std::move(options)),
      disk_(options_.hook),
      folder_(checkpoints_folder(dir)),
      temporary_(join_path(folder_, temporary_name(step_name(step), save_id))) {
  TROUPE_CHECK(step >= 0, "a checkpoint needs a step");
}

template <class Body>
void CheckpointWriter::guard(const Body& body) const {
  try {
    body();
  } catch (const UserError& error) {
    throw UserError(error.status(),
                    "saving step " + std::to_string(step_) +
                        " failed (earlier checkpoints are intact): " + error.what());
  }
}

void CheckpointWriter::begin() const {
  try {
    guard([&] {
      disk_.make_directories(folder_);
      recover(disk_, folder_);
      disk_.make_directories(temporary_);
    });
  } catch (...) {
    abandon();
    throw;
  }
}

void CheckpointWriter::write(int32_t rank, std::span<const SliceToSave> slices) const {
  guard([&] {
    const CheckpointIndex part =
        write_shards(disk_, temporary_, rank, slices, options_.max_shard_bytes);
    disk_.write_file(join_path(temporary_, part_file(rank)), to_json(part));
  });
}

CheckpointInfo CheckpointWriter::commit(int32_t ranks, const std::string& troupe_version,
                                        const std::string& training) const {
  const std::string name = step_name(step_);
  const std::string final = join_path(folder_, name);
  const std::string replaced_name = std::string(kReplacedPrefix) + name;
  const std::string replaced = join_path(folder_, replaced_name);
  try {
    guard([&] {
      CheckpointIndex index = join_parts(temporary_, ranks);
      index.step = step_;
      index.troupe_version = troupe_version;
      index.training = training;
      const std::string text = to_json(index);
      for (int32_t rank = 0; rank < ranks; ++rank) {
        disk_.remove_tree(join_path(temporary_, part_file(rank)));
      }
      disk_.write_file(join_path(temporary_, kIndexFile), text);
      disk_.write_file(join_path(temporary_, kCommitFile),
                       hash_to_hex(hash_bytes(text.data(), text.size())) + "\n");
      disk_.sync_directory(temporary_);
      if (path_exists(final)) {
        // Left by recover() only when neither it nor `final` is complete.
        if (path_exists(replaced)) discard(disk_, folder_, replaced_name);
        disk_.rename(final, replaced);
        disk_.sync_directory(folder_);
      }
      disk_.rename(temporary_, final);
      disk_.sync_directory(folder_);
    });
  } catch (...) {
    undo(temporary_, replaced, final);
    throw;
  }
  if (path_exists(replaced)) discard(disk_, folder_, replaced_name);
  return {step_, final};
}

void CheckpointWriter::abandon() const {
  std::error_code error;
  std::filesystem::remove_all(temporary_, error);
}

CheckpointInfo save_checkpoint(const std::string& dir, const CheckpointContent& content,
                               const CheckpointOptions& options) {
  const CheckpointWriter writer(dir, content.step, static_cast<uint64_t>(::getpid()), options);
  // Before anything is written: here all slices are known.
  TensorList tensors;
  for (const SliceToSave& slice : content.slices) {
    StoredTensor& tensor = tensors.add(slice);
    if (bytes_of(slice) > 0) tensor.slices.push_back({"", "", slice.box, 0});
  }
  tensors.check_tiling();
  writer.begin();
  try {
    writer.write(0, content.slices);
  } catch (...) {
    writer.abandon();
    throw;
  }
  return writer.commit(1, content.troupe_version, content.training);
}

std::vector<CheckpointInfo> list_checkpoints(const std::string& dir,
                                             std::vector<std::string>* incomplete) {
  const std::string folder = checkpoints_folder(dir);
  // A replaced checkpoint (".old_step_...") stands in for its step while the new one is not in
  // place.
  std::map<int64_t, std::string> complete;
  std::map<int64_t, std::string> replaced;
  for (const std::string& name : names_in(folder)) {
    const std::string path = join_path(folder, name);
    const bool is_replaced = name.starts_with(kReplacedPrefix);
    const std::optional<int64_t> step =
        parse_step_name(is_replaced ? name.substr(kReplacedPrefix.size()) : name);
    if (step) {
      const std::string fault = incompleteness(path, *step);
      if (fault.empty()) {
        (is_replaced ? replaced : complete).emplace(*step, path);
      } else if (incomplete != nullptr) {
        incomplete->push_back(fault);
      }
    } else if (name.starts_with(kTemporaryPrefix) && incomplete != nullptr) {
      incomplete->push_back(path + ": a save or a deletion that is under way or did not finish");
    }
  }
  complete.merge(replaced);
  std::vector<CheckpointInfo> result;
  for (auto& [step, path] : complete) result.push_back({step, std::move(path)});
  return result;
}

std::optional<CheckpointInfo> newest_checkpoint(const std::string& dir,
                                                std::vector<std::string>* incomplete) {
  const std::vector<CheckpointInfo> checkpoints = list_checkpoints(dir, incomplete);
  if (checkpoints.empty()) return std::nullopt;
  return checkpoints.back();
}

bool has_checkpoint_folders(const std::string& dir) {
  const std::vector<std::string> names = names_in(checkpoints_folder(dir));
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return parse_step_name(name).has_value(); });
}

std::optional<int64_t> newest_checkpoint_folder(const std::string& dir) {
  std::optional<int64_t> newest;
  for (const std::string& name : names_in(checkpoints_folder(dir))) {
    if (const auto step = parse_step_name(name)) newest = std::max(*step, newest.value_or(*step));
  }
  return newest;
}

std::vector<CheckpointInfo> prune_checkpoints(const std::string& dir, const KeepRule& rule,
                                              const DiskHook& hook) {
  TROUPE_CHECK(rule.newest >= 1, "pruning must keep at least one checkpoint");
  const Disk disk(hook);
  const std::string folder = checkpoints_folder(dir);
  recover(disk, folder);
  const std::vector<CheckpointInfo> checkpoints = list_checkpoints(dir);
  const std::optional<int64_t> best = best_checkpoint_step(dir);
  std::vector<CheckpointInfo> doomed;
  int64_t counted = 0;
  for (size_t i = checkpoints.size(); i-- > 0;) {
    const int64_t step = checkpoints[i].step;
    const bool stays =
        step == best || (rule.retain_interval > 0 && step % rule.retain_interval == 0);
    if (stays || counted++ < rule.newest) continue;
    doomed.push_back(checkpoints[i]);
  }
  std::reverse(doomed.begin(), doomed.end());
  for (const CheckpointInfo& checkpoint : doomed) {
    discard(disk, folder, step_name(checkpoint.step));
  }
  return doomed;
}

void remove_checkpoint(const std::string& dir, int64_t step, const DiskHook& hook) {
  const std::string folder = checkpoints_folder(dir);
  if (!path_exists(join_path(folder, step_name(step))) || best_checkpoint_step(dir) == step) return;
  discard(Disk(hook), folder, step_name(step));
}

void mark_best_checkpoint(const std::string& dir, int64_t step, const DiskHook& hook) {
  const Disk disk(hook);
  const std::string folder = checkpoints_folder(dir);
  const std::string temporary = join_path(folder, temporary_name(kBestLink));
  disk.remove_tree(temporary);
  disk.make_link(step_name(step), temporary);
  disk.rename(temporary, join_path(folder, kBestLink));
  disk.sync_directory(folder);
}

std::optional<int64_t> best_checkpoint_step(const std::string& dir) {
  std::error_code error;
  const auto target =
      std::filesystem::read_symlink(join_path(checkpoints_folder(dir), kBestLink), error);
  if (error) return std::nullopt;
  const std::optional<int64_t> step = parse_step_name(target.string());
  if (!step || !path_exists(join_path(checkpoints_folder(dir), target.string()))) {
    return std::nullopt;
  }
  return step;
}

namespace {

// What to load instead of a checkpoint that is damaged.
std::string earlier_of(const std::string& path, int64_t step) {
  std::string text = "; load an earlier checkpoint";
  for (const CheckpointInfo& other : list_checkpoints(parent_path(parent_path(path)))) {
    if (other.step < step) {
      text = "; load the complete one before it, of step " + std::to_string(other.step);
    }
  }
  return text;
}

}  // namespace

struct Checkpoint::Shards {
  std::unordered_map<std::string, SafetensorsFile> by_name;
  std::unordered_map<std::string_view, const StoredTensor*> tensors;  // of the index, by name

  // The entry's bytes have this hash. Reads them when it is first asked.
  bool verify(const SafetensorsFile& file, const TensorEntry& entry, uint64_t hash) {
    {
      const std::lock_guard lock(mutex);
      if (verified.contains(&entry)) return true;
    }
    const std::span<const std::byte> bytes = file.bytes(entry);
    if (hash_bytes(bytes.data(), bytes.size()) != hash) return false;
    const std::lock_guard lock(mutex);
    verified.insert(&entry);
    return true;
  }

 private:
  std::mutex mutex;
  std::unordered_set<const TensorEntry*> verified;
};

Checkpoint::Checkpoint() : shards_(std::make_unique<Shards>()) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Checkpoint Checkpoint::open(const std::string& path) {
  Checkpoint result;
  result.path_ = path;
  result.index_ = read_committed_index(path, &result.hash_);
  for (const StoredTensor& tensor : result.index_.tensors) {
    result.shards_->tensors.emplace(tensor.name, &tensor);
  }
  size_t tensors_in_shards = 0;
  for (const StoredShard& shard : result.index_.shards) {
    SafetensorsFile file = SafetensorsFile::open(join_path(path, shard.file));
    if (hash_bytes(file.header().data(), file.header().size()) != shard.header_hash) {
      throw_failed(file.path() + " is damaged: its header does not have the hash that was saved" +
                   earlier_of(path, result.step()));
    }
    tensors_in_shards += file.entries().size();
    result.shards_->by_name.emplace(shard.file, std::move(file));
  }
  size_t slices = 0;
  std::unordered_set<const TensorEntry*> used;
  for (const StoredTensor& tensor : result.index_.tensors) {
    for (const StoredSlice& slice : tensor.slices) {
      const SafetensorsFile& file = result.shards_->by_name.at(slice.file);
      const std::string where = file.path() + ": tensor " + quote_name(slice.tensor);
      const TensorEntry* entry = file.find(slice.tensor);
      if (entry == nullptr) throw_failed(where + " is missing, but the index refers to it");
      std::vector<int64_t> extents;
      for (int i = 0; i < slice.box.shape.rank(); ++i) extents.push_back(slice.box.shape[i]);
      if (entry->dtype != to_file_dtype(tensor.dtype) || entry->shape != extents) {
        throw_failed(where + " has another dtype or shape than the index says");
      }
      if (!used.insert(entry).second) throw_failed(where + " is used twice by the index");
      ++slices;
    }
  }
  if (slices != tensors_in_shards) {
    throw_failed(path + ": its shards hold " + std::to_string(tensors_in_shards) +
                 " tensors, but its index refers to " + std::to_string(slices));
  }
  return result;
}

void Checkpoint::load(std::span<const SliceToLoad> slices, std::span<const CheckpointRole> roles,
                      std::span<const std::string> elsewhere, const WorkReport& report) const {
  std::unordered_set<std::string_view> known(elsewhere.begin(), elsewhere.end());
  const auto is_wanted = [&](CheckpointRole role) {
    return std::find(roles.begin(), roles.end(), role) != roles.end();
  };
  for (const SliceToLoad& slice : slices) {
    TROUPE_CHECK(is_wanted(slice.role),
                 "tensor " + slice.name + " has a role that is not to be loaded");
    known.insert(slice.name);
  }
  NameList unexpected;
  for (const StoredTensor& tensor : index_.tensors) {
    if (is_wanted(tensor.role) && !known.contains(tensor.name)) {
      unexpected.add(quote_name(tensor.name));
    }
  }
  check_request(*this, slices, unexpected);
  fill(slices, report);
}

void Checkpoint::load_some(std::span<const SliceToLoad> slices, const WorkReport& report) const {
  check_request(*this, slices, {});
  fill(slices, report);
}

const StoredTensor* Checkpoint::find(std::string_view name) const {
  const auto found = shards_->tensors.find(name);
  return found == shards_->tensors.end() ? nullptr : found->second;
}

void Checkpoint::fill(std::span<const SliceToLoad> slices, const WorkReport& report) const {
  // In the order of the index.
  std::map<const StoredTensor*, std::vector<const SliceToLoad*>> requests;
  for (const SliceToLoad& slice : slices) requests[find(slice.name)].push_back(&slice);
  uint64_t done = 0;
  uint64_t total = 0;
  for (const SliceToLoad& slice : slices) {
    total += static_cast<uint64_t>(slice.box.shape.elements()) * size_of(slice.dtype);
  }
  for (const auto& [stored, wanted] : requests) {
    const StoredTensor& tensor = *stored;
    std::vector<size_t> filled(wanted.size(), 0);
    for (const StoredSlice& slice : tensor.slices) {
      const SafetensorsFile& file = shards_->by_name.at(slice.file);
      const TensorEntry& entry = *file.find(slice.tensor);
      bool is_read = false;
      for (size_t i = 0; i < wanted.size(); ++i) {
        const Box common = intersection(slice.box, wanted[i]->box);
        if (common.shape.elements() == 0) continue;
        if (!is_read && !shards_->verify(file, entry, slice.hash)) {
          throw_failed(file.path() + " is damaged: tensor " + quote_name(slice.tensor) +
                       " does not have the hash that was saved" + earlier_of(path_, step()));
        }
        is_read = true;
        const size_t copied =
            copy_box(common, slice.box, file.bytes(entry).data(), wanted[i]->box,
                     static_cast<std::byte*>(wanted[i]->data), size_of(tensor.dtype));
        filled[i] += copied;
        done += copied;
      }
      if (is_read) file.forget(entry);
      if (report) report(done, total);
    }
    for (size_t i = 0; i < wanted.size(); ++i) {
      TROUPE_CHECK(
          filled[i] == static_cast<size_t>(wanted[i]->box.shape.elements()) * size_of(tensor.dtype),
          "tensor " + tensor.name + " was not filled exactly once");
    }
  }
}

}  // namespace troupe
