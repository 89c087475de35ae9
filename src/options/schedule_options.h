// From options to the schedules of a run: learning rate, weight decay and global batch size.
//
// Pure functions; any thread. Options that contradict each other are a UserError (bad request) that
// names the flags.
#pragma once

#include <cstdint>

#include "options/options.h"
#include "options/schedules.h"

namespace troupe {

// The global batch sizes that --global-batch-size, --rampup-batch-size or
// --step-batch-size-schedule describe, each a multiple of --micro-batch-size times the
// data-parallel size. `sequence` turns thresholds in tokens into samples.
BatchSizeSchedule make_batch_sizes(const Options& options, int32_t sequence);

// --lr and --train-iters or --train-samples must be set.
Schedules make_schedules(const Options& options);

// Refuses what the two functions above would refuse, as far as it shows without a model.
void check_schedules(const Options& options);

}  // namespace troupe
