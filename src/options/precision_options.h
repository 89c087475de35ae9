// From options to the products of a training step whose operands are in 8 bits
// (passes/precision.h), by Megatron's flags.
//
// Pure function; any thread. Errors are UserErrors (bad request) that name the flag.
#pragma once

#include "model/model_config.h"
#include "options/options.h"
#include "passes/precision.h"

namespace troupe {

// RunLayout::amax_history.
int32_t amax_history_of(const Options& options);

PrecisionOptions precision_options_of(const Options& options, const ModelConfig& config);

}  // namespace troupe
