// From options to what is computed a second time in the backward pass (passes/recompute.h), by
// Megatron's rules.
//
// Pure function; any thread. Errors are UserErrors (bad request) that name the flag.
#pragma once

#include "model/model_config.h"
#include "options/options.h"
#include "passes/recompute.h"

namespace troupe {

RecomputeOptions recompute_options_of(const Options& options, const ModelConfig& config);

}  // namespace troupe
