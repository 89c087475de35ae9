// How the forward pass reads its parameters. Model code names a parameter and gets the rank's whole
// slice of it, however the ranks keep it.
#pragma once

#include "model/model_state.h"
#include "program/builder.h"

namespace troupe {

// The rank's slice of a parameter, which its stages hold. Where parameters are
// sharded (StateSharding::parameters), emits the collective that gathers the slice; so it is
// called once for each use, by all ranks alike.
ValueId read_parameter(Builder& builder, const ModelState& state, ParameterId id);

}  // namespace troupe
