// A training step with the memory that it takes: what a run checks before it allocates, and what
// `troupe plan` prints.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/device.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"

namespace troupe {

// The training step of one rank, verified, and planned for its device; `gpu` as in
// plan_memory().
struct PlannedStep {
  TrainingStep step;
  MemoryPlan plan;
};
PlannedStep plan_training_step(const ModelConfig& config, const ModelState& state,
                               const TrainingStepOptions& options, int threads, Device device,
                               const DeviceTraits& gpu, bool oracle = false);

// The plan's bytes of one rank, one role a line ("  parameters   12.00 MiB"), then what evaluation
// needs beside it, and the total, which has what lies in the host's memory on the CPU alone.
std::string describe_memory(const MemoryPlan& plan, uint64_t evaluation_bytes);

}  // namespace troupe
