// Where the time of a training step goes: what Interpreter::run_profiled() saw, by kind of
// operation, as gaps, and as a timeline for Perfetto (https://ui.perfetto.dev).
//
// Borrows the program. One thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "program/program.h"
#include "runtime/interpreter.h"
#include "train/options.h"

namespace troupe {

struct KindTime {
  std::string kind;    // of operation
  int64_t count = 0;   // of operations of this kind in a step
  double seconds = 0;  // sum of the medians of its operations
  double flops = 0;    // by the operations' cost
  double bytes = 0;
};

// Of one run.
struct StepTimes {
  double seconds = 0;          // from the beginning of the first span to the end of the last
  double busy_s = 0;           // when anything ran
  double communication_s = 0;  // when the communication queue ran
  double exposed_communication_s = 0;  // and the compute queue did not
  double largest_gap_s = 0;            // between operations, when none ran
  std::string after_gap;               // the kind of operation that began then
};

class StepProfile {
 public:
  explicit StepProfile(const Program& program);

  // Adds a run.
  void add(std::vector<WorkSpan> spans);

  // Medians over the runs, the kind that takes longest first.
  std::vector<KindTime> kinds() const;

  // Of the last run.
  StepTimes times() const;

  // Writes the last run as Trace Event JSON, which Perfetto and Chrome open: a track for each
  // queue, a span named by its operation, with layer, micro-batch, phase and kernel as arguments.
  // `rank` numbers the process in it. Throws UserError when the file cannot be written.
  void write_timeline(const std::string& path, int32_t rank) const;

 private:
  const Program& program_;
  std::vector<std::vector<double>> times_;  // of each operation in each run, in s
  std::vector<WorkSpan> last_;
};

// --profile-dir/rank<R>_step<N>.json: where the timeline of a step belongs.
std::string profile_path(const Options& options, int32_t rank, int64_t step);

// --profile, --profile-step-start, --profile-step-end and --profile-ranks: whether this rank's
// `step`, counted from 1, is profiled.
bool is_profiled(const Options& options, int32_t rank, int64_t step);

// What this machine can do at best, per second.
struct ProfileLimits {
  double flops = 0;       // in matrix products
  double copy_bytes = 0;  // read and written
};
// Measured now, which takes about half a second, and memory meanwhile.
ProfileLimits measure_limits(DType compute_dtype, ThreadPool& pool, Device device);

// The table of kinds, with rates beside the limits, and a line about the last run. Only kinds whose
// name contains `filter`.
std::string describe_profile(const StepProfile& profile, const ProfileLimits& limits,
                             const std::string& filter = {});

}  // namespace troupe
