// Builds the two kinds of feed-forward block: a dense SwiGLU MLP and a dropless Mixture of Experts.
#pragma once

#include "model/decoder.h"

namespace troupe {

// `input` is the normed residual stream [tokens, hidden]; returns the branch to be added to it.
ValueId build_dense_mlp(Builder& builder, const ModelState& state, int32_t layer, ValueId input);

// Router, permutation by expert, experts, combination. The router's weights are applied between the
// activation and the second product, so that expert outputs need not be saved (semantics: 5.5).
// Appends the layer's auxiliary losses (in training) and expert load to `result`.
ValueId build_moe(Builder& builder, const ModelConfig& config, const ModelState& state,
                  int32_t layer, ValueId input, bool training, ForwardResult& result);

}  // namespace troupe
