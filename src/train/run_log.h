// What a run says and keeps of itself: lines on the terminal (progress.h), metrics.jsonl
// (metrics_log.h), TensorBoard files, warnings of routing and gradients, and the JSON at the end.
//
// Every rank has a RunLog; that of rank 0 alone speaks and writes. Before open() lines are printed
// at once, after it they stand among those of the steps. One thread. Only open() may fail
// (UserError): what cannot be written later is a warning, and the run goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/tensorboard.h"
#include "options/run_spec.h"
#include "train/gradient_watch.h"
#include "train/metrics_log.h"
#include "train/progress.h"
#include "train/routing_watch.h"

namespace troupe {

// How far a run came.
struct RunSummary {
  bool interrupted = false;
  int64_t step = 0;
  int64_t last_step = 0;
  int64_t tokens = 0;
  int64_t parameters = 0;
  int64_t active_parameters = 0;
  double seconds = 0;
  std::string folder = {};  // --save; empty: none
  int64_t saved_step = -1;  // -1: nothing was saved
};

class RunLog {
 public:
  // `leads`: of rank 0.
  RunLog(const ReportSpec& spec, bool leads);

  bool is_quiet() const { return spec_.quiet || !leads_; }
  // A line for a person, and one that is printed also when quiet.
  void say(const std::string& text) const;
  void warn(const std::string& text) const;

  // Opens the files of a run that begins after header.step, in `folder` (empty: none); they keep no
  // line of later steps. `options`: all of the run, for options.toml.
  void open(const std::string& folder, RunHeader header, const std::string& options,
            const ProgressOptions& progress);

  // After each step, logged or not.
  void step(const StepMetrics& metrics, bool logged);
  // A live line while an evaluation goes on; and its results, after this time.
  void evaluating(uint64_t done, uint64_t total) const;
  void evaluation(int64_t step, std::vector<EvaluationResult> results, double seconds);
  // Of the test data, when the run is over.
  void test(int64_t step, const EvaluationResult& result);
  // A checkpoint was saved, in this time.
  void saved(int64_t step, double seconds);
  // Warns of gradients much larger than before, where that is asked for.
  void watch_gradients(const StepMetrics& metrics);
  // What --json prints at the end: how far the run came, and the numbers of its last step, if it
  // has done any.
  void print_json(const RunSummary& summary, const StepMetrics& metrics) const;

 private:
  void print(const std::string& text) const;
  // To TensorBoard, if there is any and it can be written.
  void write_curves(int64_t step, std::span<const TensorboardWriter::Scalar> scalars);

  ReportSpec spec_;
  bool leads_;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<TensorboardWriter> tensorboard_;
  std::unique_ptr<Progress> progress_;
  RoutingWatch routing_watch_;
  GradientWatch gradient_watch_;
  std::vector<EvaluationResult> last_evaluation_;
  std::optional<double> test_loss_;
};

}  // namespace troupe
