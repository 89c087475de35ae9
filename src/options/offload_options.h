// From options to what waits elsewhere: in the host's memory activations (passes/offload.h) and
// optimizer state (RunLayout::optimizer_offload), by Megatron's rules; packed, rows of experts
// (passes/stash.h).
//
// Pure functions; any thread. Errors are UserErrors (bad request) that name the flag.
#pragma once

#include "model/model_config.h"
#include "options/options.h"
#include "passes/offload.h"
#include "passes/stash.h"

namespace troupe {

// StashOptions::factor where none is chosen: Megatron's.
inline constexpr double kUsualStash = 1.1;

OffloadOptions offload_options_of(const Options& options, const ModelConfig& config);

StashOptions stash_options_of(const Options& options, const ModelConfig& config);

// The part of a rank's optimizer state; 0: none.
double optimizer_offload_of(const Options& options);

}  // namespace troupe
