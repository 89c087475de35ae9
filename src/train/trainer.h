// The training run: from options to a trained model, with metrics, evaluation and checkpoints.
//
// Construction does everything that can refuse: reads the model and the data, builds, verifies and
// plans the step, compares its memory with the machine's, allocates, and loads or initialises the
// weights. run() then trains until the last step, --exit-after-step, or an interruption. One
// thread; computes on its own pool. Errors are UserErrors; what was saved before stays.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "passes/step_programs.h"
#include "runtime/cpu/cpu_interpreter.h"
#include "train/batch_feed.h"
#include "train/data_sets.h"
#include "train/evaluation.h"
#include "train/learning_rate.h"
#include "train/metrics_log.h"
#include "train/options.h"
#include "train/progress.h"
#include "train/training_checkpoint.h"

namespace troupe {

class Trainer {
 public:
  explicit Trainer(const Options& options);

  // Trains. Returns `done` or `interrupted` (after saving).
  ExitStatus run();

 private:
  // Where --load points; refuses what is not this run.
  void find_start();
  void open_data();
  // The training samples in an order for the whole run, or, in a run that goes on, in the order
  // that it had, as long as that holds enough of them.
  std::unique_ptr<SampleSource> order_training_data(const DataSets& data, SampleOptions options);
  void load_weights();
  // A new run must not mix its checkpoints with those of another one.
  void refuse_foreign_folder() const;
  // `resume`: go on with the saved run; otherwise take its weights for a new one.
  void load_checkpoint(const std::string& path, bool resume);
  // Steps to do from the present position on, in samples, and what was consumed before.
  int64_t needed_samples() const;
  // Bytes by role, and a refusal (exit status 3) when the machine has not enough memory.
  void check_memory() const;
  void print_start() const;

  StepMetrics do_step();
  void stop_if_hopeless(const StepMetrics& metrics);
  void read_layer_metrics(StepMetrics& metrics) const;
  void evaluate();
  void save();
  bool due(const std::optional<int64_t>& interval) const;

  Options options_;
  ThreadPool pool_;
  RunIdentity identity_;
  TrainingPosition position_;
  int64_t last_step_ = 0;
  int64_t micro_batches_ = 1;
  std::optional<std::string> load_path_;  // the checkpoint that --load means
  std::optional<StoredRun> resumed_;      // what it says, if the run goes on from it
  LearningRateSchedule schedule_;

  ModelState state_;
  TrainingStep step_;
  MemoryPlan plan_;
  std::unique_ptr<StateStorage> storage_;
  std::unique_ptr<CpuInterpreter> interpreter_;

  std::unique_ptr<SampleSource> training_data_;
  std::unique_ptr<SampleSource> validation_data_;
  std::unique_ptr<BatchFeed> feed_;
  std::unique_ptr<Evaluation> evaluation_;
  uint64_t evaluation_bytes_ = 0;

  std::unique_ptr<MetricsLog> log_;
  std::unique_ptr<Progress> progress_;
  int64_t last_saved_step_ = -1;
  int64_t skipped_in_a_row_ = 0;
};

// The plan's bytes, one role a line ("  parameters   12.00 MiB"), then what evaluation needs beside
// it, and the total.
std::string describe_memory(const MemoryPlan& plan, uint64_t evaluation_bytes);

}  // namespace troupe
