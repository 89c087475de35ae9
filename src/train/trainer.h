// The training run: from options to a trained model, with metrics, evaluation and checkpoints.
//
// A run has three parts: how it starts (run_start.h), the steps (step_runner.h), and what it says
// and keeps of itself (run_log.h). The Trainer is the loop that joins them, with evaluation and
// checkpoints (run_saver.h).
//
// Construction reads the model and the data, and builds, verifies and plans the step; it allocates
// nothing that is large. run() allocates, loads or initialises the weights, and trains until the
// last step, one of the --exit flags, or an interruption. One thread; computes on its session's
// pool. Errors are UserErrors; what was saved before stays.
//
// With --ranks N there are N Trainers, one for each rank of the layout, in one process or in one
// each. Each holds its part of the model and does its part of every step, on the micro-batches of
// its dp coordinate.
// All read the same metrics and so decide alike; they evaluate and save together. Rank 0 leads: it
// alone speaks and logs, commits checkpoints and deletes old ones.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/process_group.h"
#include "options/run_spec.h"
#include "train/evaluation.h"
#include "train/rank_session.h"
#include "train/run_log.h"
#include "train/run_saver.h"
#include "train/run_start.h"
#include "train/step_runner.h"
#include "train/step_time_watch.h"

namespace troupe {

class Trainer {
 public:
  // Rank `rank` of `group`, which has the ranks of `spec`; null for a run of one rank. Borrows all.
  Trainer(const RunSpec& spec, const LoadedCheckpoint& loaded, int32_t rank, ProcessGroup* group);

  // Trains. Returns `done` or `interrupted` (after saving). All ranks' run() must run at the same
  // time. Refuses at first (exit status 3) what the machine has not enough memory for, and programs
  // whose collectives do not fit together.
  ExitStatus run();

 private:
  bool leads() const { return session_.leads(); }
  // The bits that any rank has set. All ranks must ask.
  uint32_t votes_of_all(uint32_t votes) const;
  // Before anything is allocated: all ranks have the same files, their programs fit together, and
  // each machine has the memory for its ranks. All ranks must ask.
  void check_with_others() const;
  // Allocates what was planned, and fills the state.
  void prepare();
  void print_start() const;
  void open_log();
  // In place of a step: its samples count as consumed, and nothing else happens.
  void leave_step_out();
  // One step, and what is due after it. `looks`: earlier ones were slow, and it is seen why.
  void do_step(bool looks);
  void warn_of_slow_steps();
  // Ends the run (`failed`) when its first loss is not finite, or the gradients of too many steps.
  void stop_if_hopeless() const;
  // `failed` when all steps are done and the loss of the last is not finite.
  void fail_if_diverged() const;
  void note_skipped_step() const;
  void evaluate();
  void test();
  void save(SaveReason reason, bool is_last = false);
  bool due(const std::optional<int64_t>& interval) const;
  // Whether the run ends after this step though it is not the last one.
  bool must_exit() const;

  std::chrono::steady_clock::time_point begin_;
  const RunSpec& spec_;
  RankSession session_;
  RunLog log_;
  RunStart start_;
  RunSaver saver_;
  StepRunner runner_;
  TrainingPosition position_;
  StepMetrics metrics_;  // of the last step
  StepTimeWatch time_watch_;
  EvaluationPlan evaluation_plan_;  // until run(); empty in a run that does not evaluate
  uint64_t evaluation_bytes_ = 0;
  std::optional<Evaluation> evaluation_;
};

// A whole run of options.ranks ranks: what `troupe train` does. `processes`: these ranks; all
// processes must call it. Null: they are threads.
ExitStatus train(const Options& options, ProcessGroup* processes = nullptr);

}  // namespace troupe
