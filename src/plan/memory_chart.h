// A chart of the memory that a step takes while it runs, for people.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "program/program.h"

namespace troupe {

// Draws transient bytes over the program: a chart of about `width` columns and twelve lines, with
// the micro-batches and phases written below it. `live_bytes`: for each operation, not empty
// (MemoryPlan::live_bytes).
std::string draw_live_bytes(const Program& program, std::span<const uint64_t> live_bytes,
                            int width);

}  // namespace troupe
