#include "ops/registry.h"

#include <array>

#include "ops/accumulate/accumulate.h"
#include "ops/adamw/adamw.h"
#include "ops/add/add.h"
#include "ops/attention/attention.h"
#include "ops/combine/combine.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/dropout/dropout.h"
#include "ops/embedding/embedding.h"
#include "ops/fill/fill.h"
#include "ops/gradient_norm/gradient_norm.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/linear/linear.h"
#include "ops/load_balancing_loss/load_balancing_loss.h"
#include "ops/permute/permute.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"
#include "ops/route/route.h"
#include "ops/router_topk/router_topk.h"
#include "ops/router_z_loss/router_z_loss.h"
#include "ops/swiglu/swiglu.h"

namespace troupe {
namespace {

constexpr std::array kOperations = {
    &kAccumulate,
    &kAdamW,
    &kAdd,
    &kAttention,
    &kAttentionGradient,
    &kCombine,
    &kCrossEntropy,
    &kCrossEntropyGradient,
    &kDropout,
    &kEmbedding,
    &kEmbeddingWeightGradient,
    &kFill,
    &kSquaredNorms,
    &kClipCoefficient,
    &kGroupedLinear,
    &kGroupedLinearDataGradient,
    &kGroupedLinearWeightGradient,
    &kLayerNorm,
    &kLayerNormGradient,
    &kLayerNormWeightGradient,
    &kLayerNormBiasGradient,
    &kLinear,
    &kLinearDataGradient,
    &kLinearWeightGradient,
    &kLinearBiasGradient,
    &kLoadBalancingLoss,
    &kLoadBalancingLossGradient,
    &kPermute,
    &kQkNorm,
    &kQkNormGradient,
    &kQkNormWeightGradient,
    &kRmsNorm,
    &kRmsNormGradient,
    &kRmsNormWeightGradient,
    &kRopeTable,
    &kRope,
    &kRoute,
    &kRouterTopk,
    &kRouterTopkGradient,
    &kRouterZLoss,
    &kRouterZLossGradient,
    &kSwiglu,
    &kSwigluGradient,
};

}  // namespace

std::span<const OpSpec* const> all_operations() {
  return kOperations;
}

}  // namespace troupe
