// How many rows a rank's experts have room for in a training step, where ranks share the experts
// (docs/memory.md, "Room for experts").
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "program/program.h"

namespace troupe {

// Of the experts' rows in all layers and micro-batches (ops/routing/route) those with the least
// room.
struct ExpertRows {
  int64_t even = 0;           // rows with an even load; 0: there are none
  int64_t planned = 0;        // that there is room for
  bool has_fallback = false;  // more may come: then the step runs again
};
ExpertRows expert_rows_of(const Program& program, bool has_fallback);

// "room for 12.3 K rows, 1.50 times an even load; a step that needs more runs again in rounds";
// empty where the rows do not depend on the routing.
std::string text_of(const ExpertRows& rows);

}  // namespace troupe
