#include "ops/registry.h"

#include <array>

#include "ops/attention/attention/attention.h"
#include "ops/attention/attention_sinks/attention_sinks.h"
#include "ops/attention/attention_target/attention_target.h"
#include "ops/attention/causal_conv/causal_conv.h"
#include "ops/attention/context_attention/context_attention.h"
#include "ops/attention/delta_gates/delta_gates.h"
#include "ops/attention/fold_delta_states/fold_delta_states.h"
#include "ops/attention/gated_delta_rule/gated_delta_rule.h"
#include "ops/attention/gated_delta_rule/gated_delta_state.h"
#include "ops/attention/halo_rows/halo_rows.h"
#include "ops/attention/index_topk/index_topk.h"
#include "ops/attention/join_rotated/join_rotated.h"
#include "ops/attention/mla_keys/mla_keys.h"
#include "ops/attention/rope/rope.h"
#include "ops/attention/sparse_attention/sparse_attention.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/elementwise/add/add.h"
#include "ops/elementwise/add_bias/add_bias.h"
#include "ops/elementwise/column_groups/column_groups.h"
#include "ops/elementwise/dropout/dropout.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/elementwise/row_gate/row_gate.h"
#include "ops/elementwise/sigmoid_gate/sigmoid_gate.h"
#include "ops/elementwise/split_columns/split_columns.h"
#include "ops/elementwise/split_rows/split_rows.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/clone_experts/clone_experts.h"
#include "ops/exchange/coded_rows/coded_rows.h"
#include "ops/exchange/copy_to_ranks/copy_to_ranks.h"
#include "ops/exchange/exchange_heads/exchange_heads.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"
#include "ops/exchange/gather_parameter/gather_parameter.h"
#include "ops/exchange/offload/offload.h"
#include "ops/exchange/pipeline_message/pipeline_message.h"
#include "ops/exchange/prefix_sum/prefix_sum.h"
#include "ops/exchange/push_rows/push_rows.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/exchange/slices/slices.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/experts/combine/combine.h"
#include "ops/experts/expert_rows/expert_rows.h"
#include "ops/experts/grouped_bias/grouped_bias.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/experts/permute/permute.h"
#include "ops/experts/row_stash/row_stash.h"
#include "ops/losses/cross_entropy/cross_entropy.h"
#include "ops/losses/index_loss/index_loss.h"
#include "ops/losses/load_balancing_loss/load_balancing_loss.h"
#include "ops/losses/loss_scale/loss_scale.h"
#include "ops/losses/router_entropy/router_entropy.h"
#include "ops/losses/router_z_loss/router_z_loss.h"
#include "ops/losses/token_count/token_count.h"
#include "ops/norms/gated_norm/gated_norm.h"
#include "ops/norms/layer_norm/layer_norm.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/norms/rms_norm/rms_norm.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "ops/optimizer/adamw/adamw.h"
#include "ops/optimizer/gradient_norm/gradient_norm.h"
#include "ops/optimizer/muon/muon.h"
#include "ops/optimizer/newton_schulz/newton_schulz.h"
#include "ops/optimizer/shards/shards.h"
#include "ops/precision/amax_history/amax_history.h"
#include "ops/precision/code_counts/code_counts.h"
#include "ops/precision/quantize/quantize.h"
#include "ops/precision/quantize_activation/quantize_activation.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/precision/transpose_codes/transpose_codes.h"
#include "ops/products/embedding/embedding.h"
#include "ops/products/head_linear/head_linear.h"
#include "ops/products/linear/linear.h"
#include "ops/products/shift_ids/shift_ids.h"
#include "ops/routing/clone_placement/clone_placement.h"
#include "ops/routing/count_experts/count_experts.h"
#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "ops/routing/expert_bias_update/expert_bias_update.h"
#include "ops/routing/expert_capacity/expert_capacity.h"
#include "ops/routing/jitter/jitter.h"
#include "ops/routing/local_experts/local_experts.h"
#include "ops/routing/random_logits/random_logits.h"
#include "ops/routing/route/route.h"
#include "ops/routing/router_topk/router_topk.h"
#include "ops/routing/sinkhorn/sinkhorn.h"

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
    &kCloneExperts,
    &kReturnClones,
    &kCombine,
    &kContextAttention,
    &kContextAttentionGradient,
    &kCopyToRanks,
    &kCountExperts,
    &kCrossEntropy,
    &kCrossEntropyGradient,
    &kCrossEntropyOfParts,
    &kCrossEntropyPart,
    &kDecodeRows,
    &kDeltaGates,
    &kDeltaGatesGradient,
    &kDeltaGatesParameterGradient,
    &kDispatchPlan,
    &kDropout,
    &kEmbedding,
    &kEmbeddingWeightGradient,
    &kEncodeRows,
    &kExchangeCounts,
    &kSendRows,
    &kReturnRows,
    &kExpertBiasUpdate,
    &kExpertCapacity,
    &kLimitExpertRows,
    &kKeepTokens,
    &kFill,
    &kFoldDeltaStates,
    &kFoldDeltaStatesGradient,
    &kGatedDeltaRule,
    &kGatedDeltaRuleGradient,
    &kGatedDeltaState,
    &kGatedDeltaStateGradient,
    &kGatedNorm,
    &kGatedNormGradient,
    &kGatedNormWeightGradient,
    &kGatherParameter,
    &kSumParameterGradient,
    &kFinishSend,
    &kSquaredNorm,
    &kStash,
    &kUnstash,
    &kClipCoefficient,
    &kGatherShards,
    &kGroupedBias,
    &kGroupedBiasWeightGradient,
    &kGroupedBiasProbabilityGradient,
    &kGroupedLinear,
    &kGroupedLinearDataGradient,
    &kGroupedLinearWeightGradient,
    &kHaloRows,
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
    &kMlaKeys,
    &kMlaKeysGradient,
    &kMuonMomentum,
    &kMuonUpdate,
    &kNewtonSchulz,
    &kOffload,
    &kOpenStash,
    &kPermute,
    &kPlaceClones,
    &kSpreadOverClones,
    &kPrefixSum,
    &kPushRows,
    &kPushRowsBack,
    &kQkNormRope,
    &kQkNormRopeGradient,
    &kQkNormRopeWeightGradient,
    &kQkSquares,
    &kQkSquaresGradient,
    &kQuantize,
    &kQuantizeActivation,
    &kQuantizeActivationGradient,
    &kCodeCounts,
    &kDelayedAmax,
    &kAmaxHistoryUpdate,
    &kBlockAmax,
    &kQuantizedGroupedLinear,
    &kQuantizedGroupedLinearDataGradient,
    &kQuantizedGroupedLinearWeightGradient,
    &kQuantizedLinear,
    &kQuantizedLinearDataGradient,
    &kQuantizedLinearWeightGradient,
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
    &kRoundRows,
    &kRoundGradient,
    &kRoute,
    &kRouterEntropy,
    &kRouterTopk,
    &kRouterTopkGradient,
    &kRouterZLoss,
    &kRouterZLossGradient,
    &kScaleGradient,
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
    &kTransposeCodes,
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
