// The options of sparse attention, and what they make of a model's configuration. Errors are
// UserErrors that name the flag. Any thread.
#pragma once

#include "model/model_config.h"
#include "options/options.h"

namespace troupe {

// Megatron has no default sizes of an indexer: who asks for sparse attention says them.
void override_sparse_attention(const Options& options, ModelConfig& config);

}  // namespace troupe
