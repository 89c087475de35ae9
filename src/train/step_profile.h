// Where the time of a training step goes: what Interpreter::run_profiled() saw, by kind of
// operation, as gaps, and as a timeline for Perfetto (https://ui.perfetto.dev).
//
// Borrows the program. One thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "program/program.h"
#include "runtime/interpreter.h"

namespace troupe {

// Of at least one value; of an even number, the larger of the two in the middle.
double median(std::vector<double> values);

struct KindTime {
  std::string kind;    // of operation
  int64_t count = 0;   // of operations of this kind in a step
  double seconds = 0;  // sum of the medians of its operations
  double flops = 0;    // by the operations' cost
  double bytes = 0;
  std::string kernels;  // "sm90, sm90 pair"; empty: not known, or the only one of its kind
};

// Of one run.
struct StepTimes {
  double seconds = 0;          // from the beginning of the first span to the end of the last
  double busy_s = 0;           // when anything ran
  double communication_s = 0;  // when a queue of collectives ran
  double exposed_communication_s = 0;  // and the compute queue did not
  double largest_gap_s = 0;            // between operations, when none ran
  std::string after_gap;               // the kind of operation that began then
};

class StepProfile {
 public:
  // `kernels`: the variant of each operation (plan/kernel_variants.h); none: it is not known.
  explicit StepProfile(const Program& program, std::vector<std::string> kernels = {});

  // Adds a run. Of ranks whose timelines are looked at together, `begin_s` is when it began after
  // the first of them.
  void add(std::vector<WorkSpan> spans, double begin_s = 0);

  // Medians over the runs, the kind that takes longest first.
  std::vector<KindTime> kinds() const;

  // Of the last run.
  StepTimes times() const;

  // The last run as Trace Event JSON: a track for each queue, a span named by its operation, with
  // layer, micro-batch, phase, kernel and variant as arguments. `rank` numbers the process in it.
  // The events alone, with commas between them.
  std::string timeline_events(int32_t rank) const;

 private:
  const Program& program_;
  std::vector<std::string> kernels_;        // by operation, or empty
  std::vector<std::vector<double>> times_;  // of each operation in each run, in s
  std::vector<WorkSpan> last_;
  double begin_s_ = 0;  // of the last run
};

// Writes a timeline that Perfetto and Chrome open, of the events of one rank or of several. Throws
// UserError when the file cannot be written.
void write_timeline(const std::string& path, std::span<const std::string> events);

// What this machine can do at best, per second.
struct ProfileLimits {
  double flops = 0;       // in matrix products
  double copy_bytes = 0;  // read and written
};
// Measured now, which takes about half a second, and memory meanwhile.
ProfileLimits measure_limits(DType compute_dtype, ThreadPool& pool, Device device);

// The limits as they are when what the profile has seen is the best measurement: those of the kinds
// that take at least a hundredth of the time.
ProfileLimits best_limits(const ProfileLimits& measured, const StepProfile& profile);

// The table of kinds, with rates beside the limits (best_limits()), the kernels of those that have
// several, and a line about the last run.
// Only kinds whose name contains `filter`.
std::string describe_profile(const StepProfile& profile, const ProfileLimits& limits,
                             const std::string& filter = {});

}  // namespace troupe
