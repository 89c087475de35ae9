// `troupe bench --calibrate FILE.toml`: measures this machine instead of a step.
#pragma once

#include "base/error.h"
#include "comm/process_group.h"
#include "options/options.h"

namespace troupe {

// `processes`: as a command gets it. Rank 0 writes the file, whole or not at all. A signal ends it
// between two programs.
ExitStatus run_calibration(const Options& options, ProcessGroup* processes);

}  // namespace troupe
