// The order of a rank's operations in a training step: which forward is merged with which backward,
// where weight gradients have their turn, and what overlaps with exchanges.
//
// A pass (passes/pass_pipeline.h) over the program as it was emitted, stage after stage, and
// segments of it, each the operations that a stage has for one micro-batch. What no segment
// contains keeps its place between them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "passes/overlap.h"
#include "passes/work_segment.h"
#include "program/program.h"

namespace troupe {

// `segments` in the order of the program. A step of data gradients has the weight gradients' too:
// they go to the weight_gradient of their micro-batch and chunk, in the order of the data
// gradients, since the first one stores into a main gradient and the others add to it.
std::vector<int32_t> order_segments(const Program& program, std::span<const WorkSegment> segments,
                                    const OverlapOptions& overlap);

}  // namespace troupe
