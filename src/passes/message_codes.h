// Message codes: rows of tokens travel between ranks as the 8-bit codes that they are rounded to
// anyway (ops/exchange/coded_rows).
//
// A pass (passes/pass_pipeline.h) that rewrites. The model says which rows are rounded, in every
// layout (round_rows, round_gradient), and sends them as they are. Contract: an exchange of such
// rows sends their codes and decodes what it has received; rows that are rounded for exchanges
// alone are encoded in that place instead. What only marks where gradients are rounded is left out.
#pragma once

#include <cstdint>
#include <vector>

#include "passes/work_segment.h"
#include "program/program.h"

namespace troupe {

// `segments` of the program; they are moved to the order that is returned.
std::vector<int32_t> send_codes(Program& program, std::vector<WorkSegment>& segments);

}  // namespace troupe
