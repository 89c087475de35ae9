// Builds grouped-query attention with rotary positions, up to and including its output projection.
#pragma once

#include "model/forward_pass.h"
#include "model/parameters.h"
#include "program/builder.h"

namespace troupe {

// `input` is the normed residual stream [tokens, hidden]; returns the branch to be added to it.
ValueId build_attention(Builder& builder, const ModelConfig& config, const ModelState& state,
                        int32_t layer, ValueId rope_table, const BatchValues& batch, ValueId input,
                        const ForwardOptions& options);

}  // namespace troupe
