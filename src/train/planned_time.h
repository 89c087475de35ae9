// How long a training step should take by its plan (plan/step_time.h), to compare measured steps
// with: the programs that the ranks really run, on the figures of what they run on.
//
// One thread per rank; what says "all ranks" is called by all of them at once. Errors are
// UserErrors.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "passes/memory_layout.h"
#include "plan/gpu_cluster.h"
#include "train/rank_session.h"

namespace troupe {

struct PlannedTime {
  double seconds = 0;                           // of a step
  std::string hardware;                         // whose figures it goes by
  std::map<std::string_view, double> of_kinds;  // of rank 0: seconds of the operations of each kind
};

// `name`: as --hardware, empty where it is not given: then those of the rank's GPU, if a file is
// shipped for it. Nothing where none are known or wanted.
std::optional<GpuModel> hardware_of_run(const std::string& name, const RankSession& session);

// All ranks, each with its program. Ranks of a machine are a node; those that share a CPU or a GPU
// have equal parts of what it reaches. Nothing on other ranks than 0,
// and where one of the ranks has no figures. Takes as long as a look at each operation.
std::optional<PlannedTime> plan_time(const RankSession& session, const Program& program,
                                     const MemoryPlan& memory,
                                     const std::optional<GpuModel>& hardware);

}  // namespace troupe
