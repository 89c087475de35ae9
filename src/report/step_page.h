// What the page of `troupe inspect` shows of a step: its memory over time, its queues, its program.
//
// Pure functions; any thread.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "passes/memory_layout.h"
#include "program/program.h"

namespace troupe {

struct StepOnPage {
  const Program& program;
  const MemoryPlan& plan;  // of plan_memory(), or of an oracle
  bool oracle = false;
  std::string title;
  std::string command;  // the flags
  std::string text;     // print_program()
};

// A document whose fields docs/reports.md names.
nlohmann::ordered_json step_json(const StepOnPage& step);

// What was measured of such a step, in fields of its own, from a file: what bench --json printed,
// or a timeline that --profile wrote, of which `rank` counts. A file of another kind or of another
// program is a bad request.
nlohmann::ordered_json measured_json(const Program& program, const std::string& path, int32_t rank);

}  // namespace troupe
