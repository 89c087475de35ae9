// What a person sees while a run goes on. On a terminal: about fifty lines of steps that stay, and
// one live line for the step that was done last, all of them cut to the terminal's width by leaving
// out what matters least. Without a terminal: a line for each logged step, with the time of day.
// Writes to standard error only. One thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "train/metrics_log.h"
#include "train/terminal.h"

namespace troupe {

struct ProgressOptions {
  int64_t last_step = 0;
  int64_t last_token = 0;    // the run ends after this many
  int64_t log_interval = 1;  // steps between those that are logged
  double matmul_limit = 0;   // flops per second of this rank's share of the machine, as measured
  bool byte_tokens = false;  // a loss is then also bits per byte, else a perplexity
  bool quiet = false;        // prints no steps and no evaluations
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options);

  // After each step, logged or not.
  void step(const StepMetrics& metrics, bool logged);
  void evaluation(int64_t step, std::span<const EvaluationResult> results);
  void test(int64_t step, const EvaluationResult& result);
  // A live line for what goes on between two steps: "validating 3/16 batches".
  void between_steps(std::string_view what, uint64_t done, uint64_t total, std::string_view unit);
  // A line of its own, for saving and other events; also when quiet.
  void line(const std::string& text);

 private:
  void evaluated(int64_t step, std::string_view what, const EvaluationResult& result);
  std::string describe(const StepMetrics& metrics);
  bool stays(const StepMetrics& metrics, bool logged) const;
  void draw(const std::string& text);

  ProgressOptions options_;
  LiveLine line_;
  int64_t stay_interval_;  // steps between lines that stay on a terminal
  double best_flops_;      // per second: of the measurement or of a step, whichever was faster
  double seconds_per_token_ = 0;  // smoothed; not per step: steps need not have one size
  int64_t steps_ = 0;             // seen
  int64_t last_seen_ = 0;         // its number
  std::chrono::steady_clock::time_point drawn_{};  // when the live line was last drawn
};

// Steps between lines of which a run of `last_step` steps prints about fifty: a round multiple of
// the steps between those that are logged.
int64_t interval_of_lines(int64_t last_step, int64_t log_interval);

// A loss in nats per token, in the unit in which models are compared: "2.862 bits/byte" where
// tokens are bytes, "perplexity 17.45" otherwise.
std::string loss_for_comparison(double nats, bool byte_tokens);

// The experts' loads of a step: one line of blocks for each MoE layer, none wider than `columns`,
// and what the worst layer is. Of many layers the worst ones. No newline at the end; empty without
// MoE layers.
std::string expert_load_chart(const StepMetrics& metrics, size_t columns);

}  // namespace troupe
