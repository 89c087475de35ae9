// The options of rotary positions and of multi-latent attention, and what they make of a model's
// configuration. Errors are UserErrors that name the flag. Any thread.
#pragma once

#include "model/model_config.h"
#include "options/options.h"

namespace troupe {

// `by_flags`: the configuration is one that flags alone describe, whose latent attention has
// Megatron's defaults.
void override_latent_attention(const Options& options, bool by_flags, ModelConfig& config);

// After that of the attention: multi-latent attention of flags stretches positions by yarn.
void override_positions(const Options& options, bool by_flags, ModelConfig& config);

}  // namespace troupe
