// What a training checkpoint means: which tensors of a run's state it holds, and the facts beside
// them from which the run goes on bit for bit. The files are io/checkpoint.h's matter.
//
// Everything random in a run is a pure function of its seed and its position, so seed and position
// are the whole state of the random numbers and of the data. Errors are UserErrors. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/work_report.h"
#include "comm/process_group.h"
#include "io/checkpoint.h"
#include "model/parameters.h"
#include "runtime/state_storage.h"
#include "train/run_identity.h"

namespace troupe {

// What a checkpoint holds besides the weights, and why it was made.
struct SavedParts {
  bool optimizer = true;  // moments and master weights
  bool seed = true;
  bool by_clock = false;  // made between those that were asked for by steps; may be removed later
};

// A save that has failed on some rank while all ranks are still there: nothing was committed, what
// was saved before stays, and the run may go on and try again. All ranks throw it at once; the
// message of rank 0 names the rank that has failed.
class SaveFailed : public UserError {
 public:
  using UserError::UserError;
};

// Saves parameters, optimizer state (main gradients are rebuilt by each step), the tokenizer's file
// and those of the source below `dir`.
//
// Of several ranks all must call it at the same time, with the `group` of the layout's ranks. Every
// rank writes what no lower one holds, and the first one commits (CheckpointWriter). If a rank
// fails, nothing is committed and all throw SaveFailed; any other error means that ranks are gone.
// The path is known to the first rank; the others get an empty one, when the checkpoint is
// complete.
CheckpointInfo save_training_checkpoint(const std::string& dir, const RunIdentity& identity,
                                        const TrainingPosition& position, const ModelState& state,
                                        const StateStorage& storage, ProcessGroup* group = nullptr,
                                        const CheckpointOptions& options = {},
                                        const SavedParts& parts = {});

// The bytes of the tensors that such a save writes, of all ranks together. All must ask.
uint64_t checkpoint_bytes(const RunIdentity& identity, const ModelState& state,
                          const StateStorage& storage, ProcessGroup* group,
                          const SavedParts& parts = {});

// The facts of a checkpoint, without its tensors (but with the files that it keeps as such).
struct StoredRun {
  RunIdentity identity;  // with seed 0 where the seed was left out
  TrainingPosition position;
  SavedParts parts;
};
StoredRun read_stored_run(const Checkpoint& checkpoint);

// Refuses (bad request) to go on with a run under another identity; names what differs. The
// schedules are compared by require_same_schedules. `any_seed`: the seed may be another one.
void require_same_run(const StoredRun& stored, const RunIdentity& wanted, const std::string& path,
                      bool any_seed = false);

// Refuses (bad request) to go on with data of the same counts and other contents. What is not known
// of either side (a checkpoint of an older version, a hash that is not complete) is not compared.
// `prefixes`: of the data sets.
void require_same_data(const StoredRun& stored, const RunIdentity& wanted,
                       const std::vector<std::string>& prefixes, const std::string& path);

// Refuses (bad request) to go on under other schedules than those of the checkpoint at `path`.
void require_same_schedules(const StoredRun& stored, const Schedules& wanted,
                            const std::string& path);

// The checkpoint that a path means: the path itself, if it is one, or else the newest complete one
// of the run in that folder, or that of `step`. Lines about incomplete ones are added to
// `incomplete`.
std::optional<std::string> find_checkpoint(const std::string& path,
                                           std::optional<int64_t> step = std::nullopt,
                                           std::vector<std::string>* incomplete = nullptr);

// One sentence when `path` is the folder of a run in which a later checkpoint than the one at
// `chosen` is damaged; otherwise empty. It names both steps and the damage, the last of
// `incomplete` (find_checkpoint).
std::string passed_over(const std::string& path, const std::string& chosen,
                        const std::vector<std::string>& incomplete);

// Fills the storage from a checkpoint, of whatever layout: parameters, and, `with_optimizer`, the
// optimizer state when the state has any; of each what the rank's slices hold. The checkpoint must
// be of this model. `report` is in bytes.
void load_training_state(const Checkpoint& checkpoint, const ModelConfig& config,
                         const ModelState& state, const StateStorage& storage,
                         const WorkReport& report = {}, bool with_optimizer = true);

// The optimizer as at the start of a run: moments of zero, and, with `masters_too`, master weights
// that are the weights. The host's side of the storage.
void reset_optimizer(const ModelState& state, const StateStorage& storage, bool masters_too);

// The weights alone, of whatever layout, of an open checkpoint.
class CheckpointWeights {
 public:
  // Saved in `stored_dtype`, from a model of this configuration: weights of another are refused.
  CheckpointWeights(Checkpoint checkpoint, DType stored_dtype, const ModelConfig& config);

  // Fills the parameters that the state declares, which may be of another compute dtype: values are
  // converted with one rounding. Master weights are the stored ones, or else the stored values;
  // where the state computes in another dtype, its values come from the stored master weights if
  // there are any. Values that are not finite in the state's dtype are refused (exit status 1) with
  // the tensor's name. `report` is in bytes.
  void load(const ModelState& state, const StateStorage& storage,
            const WorkReport& report = {}) const;

 private:
  Checkpoint checkpoint_;
  ModelState saved_;  // as the whole model was declared when it was saved
};

}  // namespace troupe
