// How the forward pass reads its parameters. Model code names a parameter and gets the rank's whole
// slice of it, however the ranks keep it.
#pragma once

#include <cstdint>

#include "model/parameters.h"
#include "program/builder.h"

namespace troupe {

// The rank's slice of a parameter; invalid when it has no such parameter. Where parameters are
// sharded (StateSharding::parameters), emits the collective that gathers the slice; so it is
// called once for each use, by all ranks alike.
ValueId read_parameter(Builder& builder, const ModelState& state, ParameterKind kind,
                       int32_t layer = -1);

}  // namespace troupe
