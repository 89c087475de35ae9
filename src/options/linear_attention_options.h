// The options of layers that have gated delta nets instead of attention, and of attention with an
// output gate, and what they make of a model's configuration. Errors are UserErrors that name the
// flag. Any thread.
#pragma once

#include "model/model_config.h"
#include "options/options.h"

namespace troupe {

// Sizes that neither the flags nor the model say are Megatron's defaults.
void override_linear_attention(const Options& options, ModelConfig& config);

}  // namespace troupe
