// A program with the memory that it takes: what a rank checks before it allocates, and what
// `troupe plan` prints.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/device.h"
#include "options/options.h"
#include "passes/memory_plan.h"
#include "program/program.h"

namespace troupe {

// A program that a rank is going to run, and its plan.
struct PlannedProgram {
  const Program* program = nullptr;
  const MemoryPlan* memory = nullptr;
};

// The plan of one rank's program for its device, both verified; `gpu` as in plan_memory().
// `oracle`: without any reuse.
MemoryPlan plan_program(const Program& program, int threads, Device device, const DeviceTraits& gpu,
                        bool oracle = false);

// The same for those who vary options, by what these say: for their device, and on --gpus or this
// machine's first GPU.
MemoryPlan plan_program(const Program& program, const Options& options);

// The plan's bytes of one rank, one role a line ("  parameters   12.00 MiB"), then what evaluation
// and other runs of the same rank need beside it, and the total, which has what lies in the host's
// memory on the CPU alone.
std::string describe_memory(const MemoryPlan& plan, uint64_t evaluation_bytes = 0,
                            uint64_t other_runs = 0);

}  // namespace troupe
