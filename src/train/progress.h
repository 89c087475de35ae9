// What a person sees while a run goes on: one line per logged step, rewritten in place on a
// terminal. Writes to standard error only. One thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "train/metrics_log.h"

namespace troupe {

class Progress {
 public:
  // The run ends after `last_step`, and `last_token` tokens. `matmul_limit` in flops per second;
  // `quiet` prints nothing but warnings.
  Progress(int64_t last_step, int64_t last_token, double matmul_limit, bool quiet);

  void step(const StepMetrics& metrics);
  void evaluation(int64_t step, std::span<const EvaluationResult> results);
  // A line of its own, for saving and other events.
  void note(const std::string& text);
  // Likewise, also when quiet.
  void warning(const std::string& text);

 private:
  void print_line(const std::string& text, bool stays);

  int64_t last_step_;
  int64_t last_token_;
  double matmul_limit_;
  bool quiet_;
  bool terminal_;
  bool line_open_ = false;
  // Smoothed. Not per step: steps need not have one size.
  double seconds_per_token_ = 0;
};

// The experts' loads of each layer as a bar chart for the terminal, `width` columns wide.
std::string expert_load_chart(const StepMetrics& metrics, int width);

}  // namespace troupe
