// How a training run starts: from what it is asked to do, and from the checkpoint that --load
// means, to what the run is, where it begins and ends, the data that it reads and the weights that
// it has.
//
// Construction opens the data; it allocates nothing large. Every rank has a RunStart; what says
// "all ranks" is called by all of them at once. Borrows all arguments. One thread. Errors are
// UserErrors that name the flag or the file.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "options/run_spec.h"
#include "train/data_hash.h"
#include "train/data_sets.h"
#include "train/evaluation.h"
#include "train/rank_session.h"
#include "train/run_log.h"
#include "train/run_saver.h"
#include "train/training_checkpoint.h"

namespace troupe {

// What lies where --load points.
struct LoadedCheckpoint {
  std::optional<std::string> path;  // unset: there is none
  std::optional<StoredRun> stored;  // what it says
  uint64_t hash = 0;                // of its index
  std::optional<SavedArgs> args;    // where the run takes its model from it
};

// `save`: the folder that the run saves into, in which there need not be any checkpoint yet. Warns
// of checkpoints that are damaged.
LoadedCheckpoint find_loaded(const LoadSpec& load, const std::string& save, const RunLog& log);

class RunStart {
 public:
  RunStart(const RunSpec& spec, const LoadedCheckpoint& loaded, const RankSession& session,
           const RunLog& log);

  const RunIdentity& identity() const { return identity_; }
  const TrainingPosition& position() const { return position_; }  // where the run begins
  int64_t last_step() const { return last_step_; }
  // What the whole run takes, in samples: what was consumed before, and the steps still to do.
  int64_t needed_samples() const;

  const std::vector<std::string>& data_prefixes() const { return data_prefixes_; }
  const SampleSource& training_data() const { return *training_data_; }
  // None in a run that does not evaluate.
  const std::vector<EvaluationSet>& evaluation_sets() const { return evaluation_sets_; }

  // All ranks, before anything is allocated: refuses ranks with other data or weights.
  void require_same_files() const;

  // Fills the state, which is allocated: from the checkpoint, from --pretrained-checkpoint, or with
  // initial values. `saver` hears from which checkpoint of its own folder the run goes on.
  void load_weights(RankSession& session, RunSaver& saver) const;

  // The weights are those of a dense model, made into this one's when the run starts.
  bool is_upcycled() const { return spec_.load.upcycling_granularity > 0 && !resumed_; }

  // Large data are hashed in full while the run goes on. Once no rank is_hashing(), all ranks
  // compare what they have read, and refuse what the checkpoint's run was not trained on.
  bool is_hashing() const { return hasher_ != nullptr && !hasher_->is_done(); }
  void finish_hashing();

 private:
  // Does the run go on from the checkpoint, rather than take its weights?
  bool goes_on() const;
  // From the checkpoint on; refuses what is not this run.
  void go_on();
  // Where the model comes from, for `troupe convert`. Refuses random weights that may not be meant.
  void find_source();
  // From the position on, by --train-iters or --train-samples.
  void find_last_step();
  void open_data();
  // Refuses contents that the checkpoint's run was not trained on, as far as hashes are known.
  void require_data_of_checkpoint() const;
  // The training samples in an order for the whole run, or, in a run that goes on, in the order
  // that it had, as long as that holds enough of them.
  std::unique_ptr<SampleSource> order_training_data(const DataSets& data, SampleOptions options);
  // `resume`: go on with the saved run; otherwise take its weights for a new one.
  void load_checkpoint(const std::string& path, bool resume, const RankSession& session,
                       RunSaver& saver) const;
  void upcycle_weights(const RankSession& session) const;

  const RunSpec& spec_;
  const LoadedCheckpoint& loaded_;
  const RankSession& session_;
  const RunLog& log_;
  RunIdentity identity_;
  TrainingPosition position_;
  int64_t last_step_ = 0;
  const StoredRun* resumed_ = nullptr;  // what the checkpoint says, if the run goes on from it

  std::vector<std::string> data_prefixes_;
  std::unique_ptr<DataHasher> hasher_;  // until all hashes are complete
  std::unique_ptr<SampleSource> training_data_;
  std::vector<EvaluationSet> evaluation_sets_;
};

}  // namespace troupe
