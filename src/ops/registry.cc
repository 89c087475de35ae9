#include "ops/registry.h"

#include <array>

#include "ops/accumulate/accumulate.h"
#include "ops/activation/activation.h"
#include "ops/adamw/adamw.h"
#include "ops/add/add.h"
#include "ops/add_bias/add_bias.h"
#include "ops/all_gather/all_gather.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/attention/attention.h"
#include "ops/attention_sinks/attention_sinks.h"
#include "ops/attention_target/attention_target.h"
#include "ops/causal_conv/causal_conv.h"
#include "ops/column_groups/column_groups.h"
#include "ops/combine/combine.h"
#include "ops/context_attention/context_attention.h"
#include "ops/copy_to_ranks/copy_to_ranks.h"
#include "ops/count_experts/count_experts.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/delta_gates/delta_gates.h"
#include "ops/dispatch_plan/dispatch_plan.h"
#include "ops/dropout/dropout.h"
#include "ops/embedding/embedding.h"
#include "ops/exchange_heads/exchange_heads.h"
#include "ops/exchange_rows/exchange_rows.h"
#include "ops/expert_bias_update/expert_bias_update.h"
#include "ops/expert_capacity/expert_capacity.h"
#include "ops/expert_rows/expert_rows.h"
#include "ops/fill/fill.h"
#include "ops/gated_delta_rule/gated_delta_rule.h"
#include "ops/gated_norm/gated_norm.h"
#include "ops/gather_parameter/gather_parameter.h"
#include "ops/gradient_norm/gradient_norm.h"
#include "ops/grouped_bias/grouped_bias.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/head_linear/head_linear.h"
#include "ops/index_loss/index_loss.h"
#include "ops/index_topk/index_topk.h"
#include "ops/jitter/jitter.h"
#include "ops/join_rotated/join_rotated.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/linear/linear.h"
#include "ops/load_balancing_loss/load_balancing_loss.h"
#include "ops/local_experts/local_experts.h"
#include "ops/mla_rows/mla_rows.h"
#include "ops/muon/muon.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "ops/offload/offload.h"
#include "ops/permute/permute.h"
#include "ops/pipeline_message/pipeline_message.h"
#include "ops/prefix_sum/prefix_sum.h"
#include "ops/push_rows/push_rows.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/random_logits/random_logits.h"
#include "ops/reduce_scatter/reduce_scatter.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"
#include "ops/route/route.h"
#include "ops/router_entropy/router_entropy.h"
#include "ops/router_topk/router_topk.h"
#include "ops/router_z_loss/router_z_loss.h"
#include "ops/row_gate/row_gate.h"
#include "ops/shards/shards.h"
#include "ops/shift_ids/shift_ids.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/sinkhorn/sinkhorn.h"
#include "ops/slices/slices.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "ops/split_columns/split_columns.h"
#include "ops/split_rows/split_rows.h"
#include "ops/sum_over_ranks/sum_over_ranks.h"
#include "ops/token_count/token_count.h"

namespace troupe {
namespace {

constexpr std::array kOperations = {
    &kAccumulate,
    &kActivation,
    &kActivationGradient,
    &kAdamW,
    &kAdd,
    &kAddBias,
    &kAllGather,
    &kAllReduce,
    &kAttention,
    &kAttentionGradient,
    &kAttentionSinkGradient,
    &kCausalConv,
    &kCausalConvGradient,
    &kCausalConvWeightGradient,
    &kCombine,
    &kContextAttention,
    &kContextAttentionGradient,
    &kCopyToRanks,
    &kCountExperts,
    &kCrossEntropy,
    &kCrossEntropyGradient,
    &kCrossEntropyOfParts,
    &kCrossEntropyPart,
    &kDeltaGates,
    &kDeltaGatesGradient,
    &kDeltaGatesParameterGradient,
    &kDispatchPlan,
    &kDropout,
    &kEmbedding,
    &kEmbeddingWeightGradient,
    &kExchangeCounts,
    &kSendRows,
    &kReturnRows,
    &kExpertBiasUpdate,
    &kExpertCapacity,
    &kLimitExpertRows,
    &kKeepTokens,
    &kFill,
    &kGatedDeltaRule,
    &kGatedDeltaRuleGradient,
    &kGatedNorm,
    &kGatedNormGradient,
    &kGatedNormWeightGradient,
    &kGatherParameter,
    &kSumParameterGradient,
    &kFinishSend,
    &kSquaredNorm,
    &kClipCoefficient,
    &kGatherShards,
    &kGroupedBias,
    &kGroupedBiasWeightGradient,
    &kGroupedBiasProbabilityGradient,
    &kGroupedLinear,
    &kGroupedLinearDataGradient,
    &kGroupedLinearWeightGradient,
    &kHeadsToSequence,
    &kJitter,
    &kJoinColumns,
    &kJoinRows,
    &kJoinSlices,
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
    &kLocalExperts,
    &kMlaRows,
    &kMlaRowsGradient,
    &kMuonMomentum,
    &kMuonUpdate,
    &kNewtonSchulz,
    &kOffload,
    &kPermute,
    &kPrefixSum,
    &kPushRows,
    &kPushRowsBack,
    &kQkNormRope,
    &kQkNormRopeGradient,
    &kQkNormRopeWeightGradient,
    &kQkSquares,
    &kQkSquaresGradient,
    &kRandomLogits,
    &kReceive,
    &kReduceScatter,
    &kReduceShards,
    &kReload,
    &kRingAttention,
    &kRingAttentionGradient,
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
    &kSequenceToHeads,
    &kShiftIds,
    &kSinkhornTopk,
    &kSplitColumns,
    &kSplitRows,
    &kSumOverRanks,
    &kTakeSlice,
    &kTakeSliceGradient,
    &kTokenCount,
    &kTokenShare,
    &kTokenMean,
    &kSplitColumnGroups,
    &kJoinColumnGroups,
    &kSigmoidGate,
    &kSigmoidGateGradient,
    &kRowGate,
    &kRowGateGradient,
    &kAttentionTarget,
    &kHeadLinear,
    &kHeadLinearWeightGradient,
    &kIndexLoss,
    &kIndexLossGradient,
    &kIndexTopk,
    &kJoinRotated,
    &kJoinRotatedGradient,
    &kSparseAttention,
    &kSparseAttentionGradient,
};

}  // namespace

std::span<const OpSpec* const> all_operations() {
  return kOperations;
}

}  // namespace troupe
