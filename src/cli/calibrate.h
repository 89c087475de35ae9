// `troupe bench --calibrate FILE.toml`: measures this machine instead of a step.
#pragma once

#include "base/error.h"
#include "comm/process_group.h"
#include "options/options.h"

namespace troupe {

// Writes the file whole or not at all. A signal ends it between two programs.
ExitStatus run_calibration(const Options& options, const ProcessGroup* processes);

}  // namespace troupe
