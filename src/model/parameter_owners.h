// Which ranks own which parameters, where the optimizer updates whole ones
// (Optimizer::cost_of_whole) and its state is sharded over ranks that hold the same slice: each
// such parameter is one rank's alone. The costliest is given away first, always to the rank with
// the least to do so far, so that all finish at about the same time (Megatron: layer-wise
// distribution).
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model_part.h"
#include "model/parameter_spec.h"

namespace troupe {

// By the number of the parameter: the owner's place among the ranks over which its state is
// sharded; -1: it is sharded by rows, or not at all, or not in the rank's stages. All ranks of such
// a group get the same.
std::vector<int32_t> parameter_owners(std::span<const ParameterSpec> parameters,
                                      const ModelPart& part);

}  // namespace troupe
