// Runs the steps of a training run, one by one: builds and plans the program, writes the batch into
// it, and reads what it measured. Where the global batch grows in the course of the run, the
// largest step is planned first, and another program is built when its size is due; all of them
// work on the state of the session. A step for which the experts' room did not suffice has changed
// nothing, and runs again as its fallback.
//
// Borrows all arguments. One thread per rank; all ranks run the same step at once. Errors are
// UserErrors.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "options/run_spec.h"
#include "passes/step_programs.h"
#include "plan/fallback_step.h"
#include "runtime/interpreter.h"
#include "train/batch_feed.h"
#include "train/metrics_log.h"
#include "train/planned_time.h"
#include "train/rank_session.h"
#include "train/run_identity.h"
#include "train/run_log.h"
#include "train/step_profile.h"
#include "train/step_time_watch.h"

namespace troupe {

class StepRunner {
 public:
  StepRunner(const RunSpec& spec, const RunIdentity& identity, const SampleSource& data,
             RankSession& session, const RunLog& log);

  // Builds, verifies and plans the step for a global batch of this size, on the state that the
  // session has declared. Allocates nothing large.
  void build(int32_t batch_size);

  // Of the step that was built last.
  const Program& program() const { return *step_.program; }
  const MemoryPlan& plan() const { return plan_; }
  const Program* fallback_program() const {
    return fallback_ ? fallback_->step.program.get() : nullptr;
  }
  int32_t batch_size() const { return batch_size_; }  // samples of all ranks

  // All ranks, before the session allocates memory, which the measurement needs, too: with
  // --profile what a rank can do at best.
  void measure_limits();

  // Runs the next step, of `samples` samples, and moves `position` on. `looks`: it is seen where
  // its time goes, where that can be told without --profile or with it; all ranks or none.
  StepMetrics run(TrainingPosition& position, int32_t samples, bool looks = false);

  // Of the step that was run last: the time that is planned, on rank 0 where it is known, and what
  // was seen of it.
  const std::optional<PlannedTime>& planned_time() const { return planned_time_; }
  const std::optional<SeenStep>& seen() const { return seen_; }

  // The parameters whose gradients are not all finite after a step, on any rank, for a person: the
  // first ones by name. All ranks must ask.
  std::string non_finite_gradients() const;

 private:
  // The program for this size is ready to run.
  void prepare(int32_t batch_size);
  // What the step did is void: runs the one that takes its place.
  void run_fallback(const TrainingPosition& position, StepMetrics& metrics);
  double largest_of_ranks(double here);
  void write_batch(const TrainingPosition& position);
  // Learning rates, weight decay, and the numbers of update and step.
  void write_rates(const TrainingPosition& position, StepMetrics& metrics) const;
  void advance(TrainingPosition& position, StepMetrics& metrics) const;
  void read_metrics(StepMetrics& metrics) const;
  // In place of the interpreter's run(), on all ranks: those of --profile-ranks write the timeline
  // of step number `step`, and it is printed where their time went.
  void profile(int64_t step);
  // The same for a look.
  void look();
  // After the first run of an interpreter.
  void warn_of_what_it_lacks();
  void read_layer_metrics(StepMetrics& metrics) const;
  void read_codes(StepMetrics& metrics) const;

  const RunSpec& spec_;
  const RunIdentity& identity_;
  RankSession& session_;
  const RunLog& log_;
  BatchFeed feed_;
  TrainingStepOptions step_options_;
  TrainingStep step_;
  int32_t batch_size_ = 0;  // of step_
  MemoryPlan plan_;
  std::optional<FallbackStep> fallback_;  // of step_
  std::unique_ptr<Interpreter> interpreter_;
  bool has_run_ = false;  // the interpreter
  std::optional<GpuModel> hardware_;
  std::optional<PlannedTime> planned_time_;  // of step_
  std::optional<SeenStep> seen_;
  std::unique_ptr<Interpreter> fallback_interpreter_;  // once it is needed, in the other's memory
  // The step that was run last, or is about to.
  const TrainingStep* now_ = nullptr;
  Interpreter* running_ = nullptr;
  ProfileLimits profile_limits_;  // with --profile, of a rank
};

}  // namespace troupe
