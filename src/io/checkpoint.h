// Checkpoints: DIR/checkpoints/step_XXXXXXXX/, as docs/checkpoint_format.md defines them, and
// DIR/checkpoints/best, a link to one of them.
//
// A checkpoint holds logical tensors, each cut into slices (boxes). How they are cut is the saver's
// affair; a loader asks for any boxes it likes and gets them put together from whatever is stored.
//
// Promises:
// - A checkpoint is complete or it does not count. Saving writes into a temporary folder, makes
//   everything durable and renames; a crash at any moment leaves every earlier checkpoint in place,
//   also when a step is saved again.
// - Loading is total: every requested byte is written exactly once, with bytes whose hash has been
//   verified, and every stored tensor of the wanted roles is asked for; otherwise it is refused.
//
// Errors are UserErrors: exit status 1 for broken files and failing disks, 2 for a checkpoint that
// does not fit what is to be loaded. At most one save at a time may go into or prune one DIR;
// any number may read complete checkpoints of it, except those being pruned or saved again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"
#include "base/work_report.h"
#include "io/checkpoint_index.h"
#include "io/file.h"

namespace troupe {

// One box of a logical tensor in the caller's memory: contiguous and row-major.
struct SliceToSave {
  std::string name;  // of the logical tensor; must not contain '@'
  CheckpointRole role = CheckpointRole::parameter;
  DType dtype = DType::f32;
  Shape global_shape;
  Box box;
  const void* data = nullptr;
};

struct SliceToLoad {
  std::string name;
  CheckpointRole role = CheckpointRole::parameter;
  DType dtype = DType::f32;
  Shape global_shape;
  Box box;
  void* data = nullptr;
};

struct CheckpointContent {
  int64_t step = 0;            // >= 0
  std::string troupe_version;  // of the program that saves
  std::string training;        // text of a JSON object; handed back by Checkpoint::training()
  // The slices of one tensor must agree in role, dtype and global shape and cover it exactly.
  std::vector<SliceToSave> slices;
};

struct CheckpointOptions {
  // A shard file is closed where the next slice would make its data larger than this.
  uint64_t max_shard_bytes = uint64_t{4} << 30;
  DiskHook hook;
};

struct CheckpointInfo {
  int64_t step = 0;
  std::string path;
};

// A save that several ranks share, each in a process of its own or not, on one file system. All
// make a writer of the same arguments; then, in this order,
//   1. the first rank calls begin(),
//   2. every rank calls write(), at the same time if they like,
//   3. the first rank calls commit(), or, if any rank has failed, abandon().
// The caller sees to the order (all of one step come before all of the next). Until commit() has
// done its work, nothing counts; what was saved before stays, whichever rank fails or dies.
class CheckpointWriter {
 public:
  // `save_id` tells this save from others that may have been interrupted: a process id.
  CheckpointWriter(const std::string& dir, int64_t step, uint64_t save_id,
                   CheckpointOptions options = {});

  // Removes what interrupted saves have left over, and makes the temporary folder.
  void begin() const;
  // Writes this rank's slices into shards of its own. Over all ranks, the slices of one tensor must
  // agree in role, dtype and global shape and cover it exactly. When it throws, the rank has
  // failed, and may have left files that abandon() removes.
  void write(int32_t rank, std::span<const SliceToSave> slices) const;
  // Ranks 0 to ranks - 1 have written: makes of it a checkpoint, replacing one of the same step.
  // When it throws, the temporary folder is gone.
  CheckpointInfo commit(int32_t ranks, const std::string& troupe_version,
                        const std::string& training) const;
  // Removes the temporary folder, as far as possible.
  void abandon() const;

 private:
  template <class Body>
  void guard(const Body& body) const;

  int64_t step_;
  CheckpointOptions options_;
  Disk disk_;
  std::string folder_;
  std::string temporary_;
};

// Saves a checkpoint below `dir`, replacing one of the same step. Before that it removes what
// interrupted saves have left over. When it throws, nothing that was saved before is lost and the
// temporary folder is gone.
CheckpointInfo save_checkpoint(const std::string& dir, const CheckpointContent& content,
                               const CheckpointOptions& options = {});

// The complete checkpoints below `dir`, ascending by step; none when the folder does not exist.
// Complete means: committed, with a valid index and all shards at their full size; the contents of
// the shards are verified when they are loaded. Each folder that looks like a checkpoint but does
// not count adds one line to `incomplete` that names it and says why. Changes nothing on disk.
std::vector<CheckpointInfo> list_checkpoints(const std::string& dir,
                                             std::vector<std::string>* incomplete = nullptr);

// The last of list_checkpoints, if any.
std::optional<CheckpointInfo> newest_checkpoint(const std::string& dir,
                                                std::vector<std::string>* incomplete = nullptr);

// Is anything below `dir` named as a committed checkpoint, complete or damaged? What interrupted
// saves leave over has other names, so a damaged one was whole once and must not be overwritten.
bool has_checkpoint_folders(const std::string& dir);

// The highest step of these, if there are any.
std::optional<int64_t> newest_checkpoint_folder(const std::string& dir);

// Which complete checkpoints stay: the newest ones, those of steps that are multiples of
// `retain_interval` (0: of none), and the one that is marked as the best.
struct KeepRule {
  int64_t newest = 1;  // >= 1
  int64_t retain_interval = 0;
};

// Deletes all other complete checkpoints and returns them. Checkpoints that stay for another reason
// are not counted among the newest, but the newest of all always stays. Call it after a save has
// succeeded. A half-deleted checkpoint is never taken for a complete one.
std::vector<CheckpointInfo> prune_checkpoints(const std::string& dir, const KeepRule& rule,
                                              const DiskHook& hook = {});

// Deletes the checkpoint of this step, if there is one that is not marked as the best. Call it
// after a later one has been saved.
void remove_checkpoint(const std::string& dir, int64_t step, const DiskHook& hook = {});

// Makes DIR/checkpoints/best a link to the checkpoint of this step, which must be complete. The
// link always names the old or the new one.
void mark_best_checkpoint(const std::string& dir, int64_t step, const DiskHook& hook = {});

// The step of the checkpoint that is marked as the best, if it is there.
std::optional<int64_t> best_checkpoint_step(const std::string& dir);

// An open checkpoint. It may be used from several threads at once.
class Checkpoint {
 public:
  // Opens the folder of one checkpoint (CheckpointInfo::path) and verifies the commit record, the
  // index, and the size and header of every shard.
  static Checkpoint open(const std::string& path);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::string& path() const { return path_; }
  int64_t step() const { return index_.step; }
  // Of the index, which holds the hash of every slice: two checkpoints with one hash are the same.
  uint64_t hash() const { return hash_; }
  const std::string& troupe_version() const { return index_.troupe_version; }
  // The saved JSON object; its meaning is kept, its spacing and order of names are not.
  const std::string& training() const { return index_.training; }
  const std::vector<StoredTensor>& tensors() const { return index_.tensors; }
  // nullptr when it has no tensor of this name.
  const StoredTensor* find(std::string_view name) const;

  // Fills `slices`. They may overlap one another (replicas) but not share memory; their dtype, role
  // and global shape must be those stored. Each stored tensor whose role is among `roles` must be
  // asked for by at least one slice or be named in `elsewhere`: tensors that other processes load,
  // or that the caller knowingly leaves out. Every slice's role must be among `roles`.
  //
  // What does not fit is found before anything is written. When a hash does not match (exit status
  // 1), or `report` (in bytes) throws, the memory of the slices holds unspecified values.
  void load(std::span<const SliceToLoad> slices, std::span<const CheckpointRole> roles,
            std::span<const std::string> elsewhere = {}, const WorkReport& report = {}) const;

  // The same, whatever else the checkpoint holds: a caller that loads it piece by piece has looked.
  void load_some(std::span<const SliceToLoad> slices, const WorkReport& report = {}) const;

 private:
  struct Shards;
  Checkpoint();
  void fill(std::span<const SliceToLoad> slices, const WorkReport& report) const;
  std::string path_;
  CheckpointIndex index_;
  uint64_t hash_ = 0;
  std::unique_ptr<Shards> shards_;
};

}  // namespace troupe
