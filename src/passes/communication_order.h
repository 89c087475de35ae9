// When collectives on state stand in the program: as early as they can, so that other operations
// run while they do. Two passes (passes/pass_pipeline.h); all ranks of a group move alike, as their
// programs are alike.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace troupe {

// Brings the shards of a parameter, or of its codes, together for one pass through its layer.
bool gathers_parameters(const Op& op);

// Moves each sum of main gradients up, right after the last operation that changes one. Sums over
// groups that span the pipeline stay: their ranks complete the gradients at different times, and
// would wait for each other.
std::vector<int32_t> order_gradient_sums_early(const Program& program);

// Moves each gathering of parameters to the beginning of the work before that which reads it: a
// layer's parameters travel while the layer before it computes.
std::vector<int32_t> order_gathers_early(const Program& program);

}  // namespace troupe
