// The profile of a step on the ranks of a run: where each rank's time went, and timelines in files.
//
// All ranks call each of these at once, each with its own session. Errors are UserErrors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "runtime/interpreter.h"
#include "train/rank_session.h"
#include "train/step_profile.h"

namespace troupe {

// What a rank can do at best: its share of the machine, or of its GPU, measured by rank 0 while the
// others wait.
ProfileLimits measure_limits_of_rank(const RankSession& session, DType compute_dtype);

// Runs the program on all ranks and adds what was seen to `profile`, with a beginning that all
// ranks of a machine measure by the same clock; machines begin when all ranks have met.
void add_profiled_run(Interpreter& interpreter, const RankSession& session, StepProfile& profile);

// What `text` is on the ranks among `chosen`, in their order; only on rank 0.
std::vector<std::string> gather_from(const RankSession& session, const std::vector<int32_t>& chosen,
                                     const std::string& text);

struct WrittenTimelines {
  std::string note;   // where they are
  std::string fault;  // which file could not be written, and why; empty: all were
};

// Each rank among `chosen` writes the last run of its profile as
// FOLDER/rank<R>_step<N>.json; if they are several, rank 0 writes a timeline of them all besides,
// ranks_step<N>.json. Both texts are only on rank 0, which hears of all ranks' faults.
WrittenTimelines write_timelines(const RankSession& session, const std::string& folder,
                                 int64_t step, const std::vector<int32_t>& chosen,
                                 const StepProfile& profile);

}  // namespace troupe
