// Builds the two kinds of feed-forward block: a dense MLP, and a Mixture of Experts with its
// router, its shared expert, and what balances it (docs/routing.md).
#pragma once

#include "model/forward_pass.h"
#include "model/parameters.h"
#include "program/builder.h"

namespace troupe {

// `input` is the normed residual stream [tokens, hidden]; returns the branch to be added to it.
ValueId build_dense_mlp(Builder& builder, const ModelConfig& config, const ModelState& state,
                        int32_t layer, ValueId input);

// Router, permutation by expert, experts, combination, shared expert. The router's weights are
// applied between the activation and the second product, so that expert outputs need not be saved
// for the router's gradient. Appends the layer's auxiliary losses (in training) and its report to
// `result`.
ValueId build_moe(Builder& builder, const ModelConfig& config, const ModelState& state,
                  int32_t layer, const BatchValues& batch, ValueId input,
                  const ForwardOptions& options, ForwardResult& result);

}  // namespace troupe
