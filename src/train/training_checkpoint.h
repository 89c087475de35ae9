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

#include "data/tokenizer.h"
#include "io/checkpoint.h"
#include "model/parameters.h"
#include "parallel/process_group.h"
#include "runtime/state_storage.h"
#include "train/schedules.h"

namespace troupe {

// How far a run has come.
struct TrainingPosition {
  int64_t step = 0;               // steps done
  int64_t updates = 0;            // steps that changed the weights (not skipped)
  int64_t consumed_samples = 0;   // where the data goes on
  int64_t scheduled_samples = 0;  // where the schedules go on: skipped steps do not count
  int64_t skipped_in_row = 0;     // steps skipped since the last update
  int64_t best_step = 0;          // where the validation loss was lowest; 0: not evaluated yet
  double best_loss = 0;
};

// What must stay the same for a run to go on; the schedules may change on request.
struct RunIdentity {
  ModelConfig model;
  DType compute_dtype = DType::f32;
  uint64_t seed = 0;
  int32_t sequence = 0;
  std::string split;
  TokenizerModel tokenizer;
  Schedules schedules;
  // Samples that the order of the training data is made for (SampleOptions::num_samples). A run
  // that goes on keeps it while that order lasts, so it is not compared.
  int64_t ordered_samples = 0;
  std::string data;          // fingerprint() of the data sets; another one is only warned of
  std::string options_json;  // all options, for the reader of the file; not compared
};

// Saves parameters, optimizer state (main gradients are rebuilt by each step) and the tokenizer's
// file below `dir`.
//
// Of several ranks all must call it at the same time, with the `group` of the layout's ranks. Every
// rank writes what no lower one holds, and the first one commits (CheckpointWriter). If a rank
// fails, nothing is committed and all throw: the group's work is over. The path is known to the
// first rank; the others get an empty one, when the checkpoint is complete.
CheckpointInfo save_training_checkpoint(const std::string& dir, const RunIdentity& identity,
                                        const TrainingPosition& position, const ModelState& state,
                                        const StateStorage& storage, ProcessGroup* group = nullptr,
                                        const CheckpointOptions& options = {});

// The facts of a checkpoint, without its tensors (but with the tokenizer's file, which is one).
struct StoredRun {
  RunIdentity identity;
  TrainingPosition position;
};
StoredRun read_stored_run(const Checkpoint& checkpoint);

// Refuses (bad request) to go on with a run under another identity; names what differs. The
// schedules are compared by require_same_schedules.
void require_same_run(const StoredRun& stored, const RunIdentity& wanted, const std::string& path);

// Refuses (bad request) to go on under other schedules than those of the checkpoint at `path`.
void require_same_schedules(const StoredRun& stored, const Schedules& wanted,
                            const std::string& path);

// The checkpoint that a path means: the path itself, if it is one, or else the newest complete one
// of the run in that folder, or that of `step`. Lines about incomplete ones are added to
// `incomplete`.
std::optional<std::string> find_checkpoint(const std::string& path,
                                           std::optional<int64_t> step = std::nullopt,
                                           std::vector<std::string>* incomplete = nullptr);

// Fills the storage from a checkpoint, of whatever layout: parameters, and optimizer state when the
// state has any; of each what the rank's slices hold. The checkpoint must be of this model.
void load_training_state(const Checkpoint& checkpoint, const ModelConfig& config,
                         const ModelState& state, const StateStorage& storage);

}  // namespace troupe
