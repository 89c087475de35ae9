#include "ops/registry.h"

#include <array>

#include "ops/accumulate/accumulate.h"
#include "ops/activation/activation.h"
#include "ops/adamw/adamw.h"
#include "ops/add/add.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/attention/attention.h"
#include "ops/combine/combine.h"
#include "ops/count_experts/count_experts.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/dropout/dropout.h"
#include "ops/embedding/embedding.h"
#include "ops/expert_bias_update/expert_bias_update.h"
#include "ops/expert_capacity/expert_capacity.h"
#include "ops/fill/fill.h"
#include "ops/gradient_norm/gradient_norm.h"
#include "ops/grouped_bias/grouped_bias.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/jitter/jitter.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/linear/linear.h"
#include "ops/load_balancing_loss/load_balancing_loss.h"
#include "ops/permute/permute.h"
#include "ops/pipeline_message/pipeline_message.h"
#include "ops/prefix_sum/prefix_sum.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/random_logits/random_logits.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"
#include "ops/route/route.h"
#include "ops/router_entropy/router_entropy.h"
#include "ops/router_topk/router_topk.h"
#include "ops/router_z_loss/router_z_loss.h"
#include "ops/row_gate/row_gate.h"
#include "ops/sinkhorn/sinkhorn.h"

namespace troupe {
namespace {

constexpr std::array kOperations = {
    &kAccumulate,
    &kActivation,
    &kActivationGradient,
    &kAdamW,
    &kAdd,
    &kAllReduce,
    &kAttention,
    &kAttentionGradient,
    &kCombine,
    &kCountExperts,
    &kCrossEntropy,
    &kCrossEntropyGradient,
    &kDropout,
    &kEmbedding,
    &kEmbeddingWeightGradient,
    &kExpertBiasUpdate,
    &kExpertCapacity,
    &kFill,
    &kFinishSend,
    &kSquaredNorms,
    &kSquaredNormSum,
    &kClipCoefficient,
    &kGroupedBias,
    &kGroupedBiasWeightGradient,
    &kGroupedBiasProbabilityGradient,
    &kGroupedLinear,
    &kGroupedLinearDataGradient,
    &kGroupedLinearWeightGradient,
    &kJitter,
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
    &kPrefixSum,
    &kQkNorm,
    &kQkNormGradient,
    &kQkNormWeightGradient,
    &kRandomLogits,
    &kReceive,
    &kRmsNorm,
    &kRmsNormGradient,
    &kRmsNormWeightGradient,
    &kRopeTable,
    &kRope,
    &kRoute,
    &kRouterEntropy,
    &kRouterTopk,
    &kRouterTopkGradient,
    &kRouterZLoss,
    &kRouterZLossGradient,
    &kSend,
    &kSinkhornTopk,
    &kRowGate,
    &kRowGateGradient,
};

}  // namespace

std::span<const OpSpec* const> all_operations() {
  return kOperations;
}

}  // namespace troupe
