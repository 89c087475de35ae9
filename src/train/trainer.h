// The training run: from options to a trained model, with metrics, evaluation and checkpoints.
//
// Construction reads the model and the data, and builds, verifies and plans the step; it allocates
// nothing that is large. run() allocates, loads or initialises the weights, and trains until the
// last step, one of the --exit flags, or an interruption. Where the global batch grows in the
// course of the run, the largest step is planned first and later ones are built when they are due.
// One thread; computes on its own pool. Errors are UserErrors; what was saved before stays.
//
// With --ranks N there are N Trainers, one for each rank of the layout, in one process or in one
// each. Each holds its part of the model and does its part of every step, on the micro-batches of
// its dp coordinate.
// All read the same metrics and so decide alike; they evaluate and save together. Rank 0 leads: it
// alone speaks and logs, commits checkpoints and deletes old ones.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "io/tensorboard.h"
#include "options/options.h"
#include "options/schedules.h"
#include "parallel/process_group.h"
#include "passes/step_programs.h"
#include "runtime/interpreter.h"
#include "train/batch_feed.h"
#include "train/data_hash.h"
#include "train/data_sets.h"
#include "train/evaluation.h"
#include "train/gradient_watch.h"
#include "train/metrics_log.h"
#include "train/progress.h"
#include "train/rank_session.h"
#include "train/routing_watch.h"
#include "train/run_saver.h"
#include "train/step_profile.h"
#include "train/training_checkpoint.h"

namespace troupe {

class Trainer {
 public:
  // Rank `rank` of `group`, which has options.ranks ranks and must outlive the Trainer; null for a
  // run of one rank.
  explicit Trainer(const Options& options, int32_t rank = 0, ProcessGroup* group = nullptr);

  // Trains. Returns `done` or `interrupted` (after saving). All ranks' run() must run at the same
  // time. Refuses at first (exit status 3) what the machine has not enough memory for, and programs
  // whose collectives do not fit together.
  ExitStatus run();

 private:
  bool leads() const { return session_.leads(); }
  // Prints a warning, also when quiet.
  void warn(const std::string& text) const;
  // The bits that any rank has set. All ranks must ask.
  uint32_t votes_of_all(uint32_t votes) const;
  // Before anything is allocated: all ranks were started alike, their programs fit together, and
  // each machine has the memory for its ranks. All ranks must ask.
  void check_with_others() const;
  // Where --load points.
  void find_start();
  // What the run is, by the options, or with --use-checkpoint-args by the checkpoint.
  void describe_run();
  // From the checkpoint on; refuses what is not this run.
  void go_on();
  // Where the model comes from, for `troupe convert`. Refuses random weights that may not be meant.
  void find_source();
  // From the position on, by --train-iters or --train-samples.
  void find_last_step();
  void open_data();
  // Refuses contents that the checkpoint's run was not trained on, as far as hashes are known.
  void require_data_of_checkpoint() const;
  // All ranks, once all hashes are complete: compares them.
  void finish_data_hashes();
  // The training samples in an order for the whole run, or, in a run that goes on, in the order
  // that it had, as long as that holds enough of them.
  std::unique_ptr<SampleSource> order_training_data(const DataSets& data, SampleOptions options);
  void load_weights();
  // `resume`: go on with the saved run; otherwise take its weights for a new one.
  void load_checkpoint(const std::string& path, bool resume);
  // Builds, verifies and plans the step for a global batch of this size.
  void build_step(int32_t batch_size);
  // The step's program for this size is ready to run: builds another one when the size changes.
  // All of them work on the same state.
  void prepare_step(int32_t batch_size);
  // What the whole run takes, in samples: what was consumed before, and the steps still to do.
  int64_t needed_samples() const;
  // Allocates what was planned, and fills the state.
  void start();
  void print_start() const;
  void open_logs();

  StepMetrics do_step();
  // In place of do_step(): the next step's samples count as consumed, and nothing else happens.
  void leave_step_out();
  // In place of the interpreter's run(), on all ranks: those of --profile-ranks write the step's
  // timeline, and it is printed where their time went.
  void profile_step();
  // Ends the run (`failed`) when its first loss is not finite, or the gradients of too many steps.
  void stop_if_hopeless(const StepMetrics& metrics) const;
  void note_skipped_step(const StepMetrics& metrics) const;
  // The parameters whose gradients are not all finite, on any rank, for a person: the first ones by
  // name. All ranks must ask.
  std::string non_finite_gradients() const;
  void read_layer_metrics(StepMetrics& metrics) const;
  void log_step(const StepMetrics& metrics);
  // What --json prints at the end: how far the run came, and the numbers of its last step.
  void print_json(const StepMetrics& metrics, bool interrupted) const;
  // To TensorBoard, if there is any and it can be written.
  void write_curves(std::span<const TensorboardWriter::Scalar> scalars);
  void evaluate();
  void save(SaveReason reason, bool is_last = false);
  RunSaver::Say speaker() const;
  bool due(const std::optional<int64_t>& interval) const;
  // Whether the run ends after this step though it is not the last one.
  bool must_exit() const;

  Options options_;
  std::chrono::steady_clock::time_point start_;
  RankSession session_;
  RunSaver saver_;
  RunIdentity identity_;
  TrainingPosition position_;
  int64_t last_step_ = 0;
  BatchSizeSchedule batch_sizes_;
  std::set<int64_t> skipped_steps_;
  std::optional<std::string> load_path_;  // the checkpoint that --load means
  std::optional<StoredRun> stored_;       // what it says
  uint64_t stored_hash_ = 0;
  std::optional<StoredRun> resumed_;  // the same, if the run goes on from it

  TrainingStepOptions step_options_;
  TrainingStep step_;
  int32_t step_batch_size_ = 0;  // of step_
  MemoryPlan plan_;
  std::unique_ptr<Interpreter> interpreter_;
  ProfileLimits profile_limits_;  // with --profile, of a rank

  std::vector<std::string> data_prefixes_;
  std::unique_ptr<DataHasher> hasher_;  // until all hashes are complete
  std::unique_ptr<SampleSource> training_data_;
  std::vector<EvaluationSet> evaluation_sets_;
  std::unique_ptr<BatchFeed> feed_;
  EvaluationPlan evaluation_plan_;  // until run(); empty in a run that does not evaluate
  uint64_t evaluation_bytes_ = 0;
  std::unique_ptr<Evaluation> evaluation_;
  std::vector<EvaluationResult> last_evaluation_;

  std::unique_ptr<MetricsLog> log_;
  std::unique_ptr<TensorboardWriter> tensorboard_;
  std::unique_ptr<Progress> progress_;
  RoutingWatch routing_watch_;
  GradientWatch gradient_watch_;
};

// A whole run of options.ranks ranks: what `troupe train` does. `processes`: these ranks; all
// processes must call it. Null: they are threads.
ExitStatus train(const Options& options, ProcessGroup* processes = nullptr);

}  // namespace troupe
