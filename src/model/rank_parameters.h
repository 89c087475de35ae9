// How many parameters each rank of a layout holds.
//
// Pure functions and plain values; any thread.
#pragma once

#include <cstdint>

#include "model/parameters.h"
#include "parallel/layout.h"
#include "parallel/pipeline_partition.h"

namespace troupe {

// Weights on one rank.
struct RankParameters {
  int64_t dense = 0;  // all but the experts: router and shared expert, too
  int64_t expert = 0;
  uint64_t bytes = 0;  // of all
  bool operator==(const RankParameters&) const = default;
};

// `state`: of the whole model (declare_model_state).
RankParameters count_parameters(const ModelState& state, const Layout& layout,
                                const PipelinePartition& partition, int32_t rank);

}  // namespace troupe
