// How much of the experts' exchanges (passes/overlap.h) overlaps with computation.
#pragma once

#include <cstdint>
#include <string>

#include "program/program.h"

namespace troupe {

// What there is to compute while exchanges are under way: all that stands between them and the
// first operation of the compute queue that needs their results, directly or through further
// collectives.
struct Exposure {
  int32_t exchanges = 0;
  int32_t covered = 0;  // those that overlap with compute
  double flops = 0;     // that overlap with them; what overlaps with several counts for each
};
Exposure measure_exposure(const Program& program);

// "24 operations, 22 overlap with compute (1.5 G flops)"; empty when there are none.
std::string text_of(const Exposure& exposure);

}  // namespace troupe
