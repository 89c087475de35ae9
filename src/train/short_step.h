// A step with fewer micro-batches, for questions whose answer does not depend on their number.
//
// Once the pipeline is full, each round of micro-batches repeats the one before it. So from two
// rounds on, a further one takes the same time, and no bytes but those of its inputs
// (passes/memory_plan.h).
//
// Pure functions of Options, which are resolved afterwards; any thread.
#pragma once

#include <cstdint>

#include "options/options.h"

namespace troupe {

// Rounds of a step with a full pipeline.
inline constexpr int32_t kFullRounds = 2;

// The options with a global batch of N rounds of the pipeline (as many micro-batches as it
// has ranks, or as pass a chunk in turn), or with their own largest one where that is smaller.
// `micro_batches`: those of a rank.
Options with_few_micro_batches(Options options, int32_t micro_batches, int32_t rounds);

// Of a rank, in one round.
int32_t micro_batches_of_round(const Options& options);

}  // namespace troupe
