// When and how a run saves itself below --save: at the steps that were asked for, by the clock in
// between, when an evaluation is the best so far, and at the end; and what happens when a save
// fails. The checkpoint itself is train/training_checkpoint.h's matter.
//
// A failed save ends nothing: it is reported, and tried again a minute later while training goes
// on. Checkpoints made by the clock replace one another; those that were asked for stay as
// --keep-checkpoints says. Nothing here changes a bit of the run.
//
// Every rank has a RunSaver. save() and require_room() are called by all ranks at once; rank 0
// alone holds the folder's lock, looks at the clock and deletes. Errors are UserErrors. One thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "io/folder_lock.h"
#include "options/run_spec.h"
#include "train/training_checkpoint.h"

namespace troupe {

enum class SaveReason : uint8_t { asked, clock };

class RunSaver {
 public:
  RunSaver(const SaveSpec& spec, int32_t rank, ProcessGroup* group);

  bool is_off() const { return spec_.folder.empty(); }
  // The step of the newest checkpoint of this run in --save; -1: there is none.
  int64_t last_saved_step() const { return last_saved_step_; }
  // "The checkpoint of step 7 is kept.", or that there is none.
  std::string kept() const;

  // The run goes on from the checkpoint of this step in --save itself.
  void go_on_from(int64_t step, bool by_clock);
  // Rank 0, before anything in the folder is touched: no other run writes into it.
  void lock();
  // Rank 0: the folder holds no other run, and no later checkpoints of this one.
  void refuse_foreign_folder() const;
  // All ranks, before the first step: refuses (does_not_fit) a folder without room for a
  // checkpoint. From here on the clock counts.
  void require_room(const RunIdentity& identity, const ModelState& state,
                    const StateStorage& storage);

  // Rank 0: by the clock it is time to save, or to try again after a failure.
  bool is_due() const;
  // All ranks: a checkpoint of this position, unless there is one; `say` takes lines about it on
  // rank 0 (true: a failure). Throws only when ranks are gone.
  using Say = std::function<void(const std::string& text, bool is_failure)>;
  void save(SaveReason reason, const RunIdentity& identity, const TrainingPosition& position,
            const ModelState& state, const StateStorage& storage, const Say& say);
  // The same at the end of the run: a save that fails is tried again a few times, and ends the run
  // (`failed`) on all ranks if it fails for good.
  void save_last(const RunIdentity& identity, const TrainingPosition& position,
                 const ModelState& state, const StateStorage& storage, const Say& say);

 private:
  using Clock = std::chrono::steady_clock;
  bool leads() const { return rank_ == 0; }
  SavedParts parts(SaveReason reason) const;
  // What is wrong with the room for a checkpoint of these bytes; empty: nothing.
  std::string missing_room(uint64_t bytes) const;
  // All ranks; throws SaveFailed on all of them. The new checkpoint's path, on rank 0.
  std::string write(const SavedParts& parts, const RunIdentity& identity,
                    const TrainingPosition& position, const ModelState& state,
                    const StateStorage& storage) const;
  // One save, as far as it goes; has_failed_ says how it ended.
  void attempt(SaveReason reason, const RunIdentity& identity, const TrainingPosition& position,
               const ModelState& state, const StateStorage& storage, const Say& say);
  // Marks the best checkpoint and removes those that need not stay.
  void tidy(const TrainingPosition& position, SaveReason reason);

  SaveSpec spec_;
  int32_t rank_;
  ProcessGroup* group_;
  std::unique_ptr<FolderLock> lock_;
  int64_t last_saved_step_ = -1;
  int64_t last_clock_step_ = -1;  // of the newest checkpoint that the clock made; -1: none is left
  bool has_failed_ = false;
  SaveReason failed_reason_ = SaveReason::asked;
  std::string failure_;                            // of the last attempt, on rank 0
  std::optional<Clock::time_point> last_warning_;  // of a failure, until a save succeeds
  Clock::time_point last_try_;
};

}  // namespace troupe
