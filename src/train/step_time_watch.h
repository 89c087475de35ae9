// Compares the time of a run's steps with the time that is planned for them (planned_time.h), and
// says once when they are much slower, and where.
//
// Pure bookkeeping; one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "train/metrics_log.h"
#include "train/planned_time.h"
#include "train/step_profile.h"

namespace troupe {

class StepTimeWatch {
 public:
  static constexpr size_t kSteps = 20;  // whose median is compared
  static constexpr int64_t kFirst = 3;  // of a program that are not: they touch memory, and learn
  static constexpr double kFactor = 1.2;

  // Takes in one step. Those without a plan and those that ran in rounds are passed over.
  void add(const StepMetrics& metrics);

  // The last steps took more than kFactor times what is planned, and nothing was said yet.
  bool is_slow() const;
  double seconds() const;                      // the median of the last steps
  double planned() const { return planned_; }  // for them
  void say_no_more() { has_said_ = true; }

 private:
  double planned_ = 0;
  int64_t steps_ = 0;            // of the program
  std::vector<double> seconds_;  // of the last kSteps
  bool has_said_ = false;
};

// Where the time of a step went on rank 0, as it was seen in one of them.
struct SeenStep {
  std::vector<KindTime> kinds;
  StepTimes times;
};

// The warning of steps that take `seconds` each, up to `step`. `seen`: nothing where operations
// cannot be told apart.
std::string describe_slow_steps(int64_t step, double seconds, const PlannedTime& planned,
                                const std::optional<SeenStep>& seen);

}  // namespace troupe
