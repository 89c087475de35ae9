#include "model/blocks/lightning_indexer.h"

#include "model/context_parallel.h"
#include "model/model_state.h"
#include "model/tensor_parallel.h"
#include "ops/attention/attention_target/attention_target.h"
#include "ops/attention/rope/rope.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/losses/index_loss/index_loss.h"
#include "ops/norms/layer_norm/layer_norm.h"
#include "ops/products/linear/linear.h"

namespace troupe {

IndexerSpec indexer_spec_of(const ModelConfig& config) {
  const double epsilon = config.dsa_indexer_k_norm_epsilon;
  return {.hidden = config.hidden_size,
          .query_latent = config.q_lora_rank,
          .heads = config.dsa_indexer_n_heads,
          .head_dim = config.dsa_indexer_head_dim,
          .rotary_dim = config.qk_pos_emb_head_dim,
          .top_k = config.dsa_indexer_topk,
          .norm_epsilon = epsilon > 0 ? epsilon : config.norm_epsilon,
          .loss_coefficient = config.dsa_indexer_loss_coeff,
          .has_sparse_loss = config.dsa_indexer_use_sparse_loss};
}

LightningIndexer::LightningIndexer(ParameterList& parameters, const IndexerSpec& spec,
                                   int32_t layer)
    : spec_(spec), layer_(layer) {
  const ParameterList::Options everywhere{.gradient_class = GradientClass::replicated};
  w_q_ = parameters.weight("w_index_q", {spec.query_size(), spec.query_latent}, everywhere);
  w_k_ = parameters.weight("w_index_k", {spec.head_dim, spec.hidden}, everywhere);
  k_norm_ = parameters.gain("index_k_norm", spec.head_dim, everywhere);
  k_norm_bias_ = parameters.shift("index_k_norm_bias", spec.head_dim, everywhere);
  w_weights_ = parameters.weight("w_index_weights", {spec.heads, spec.hidden}, everywhere);
}

IndexAttributes LightningIndexer::index_of(const BlockContext& context) const {
  return {.batch = context.batch.batch,
          .sequence = context.batch.sequence,
          .heads = spec_.heads,
          .head_dim = spec_.head_dim,
          .chunks = chunks_of(context.part())};
}

ValueId LightningIndexer::build_rotated(const BlockContext& context, ValueId rows,
                                        ValueId rope_table, int32_t heads,
                                        const std::string& name) const {
  return rope(context.builder, rows, rope_table,
              {.heads = heads,
               .groups = 0,
               .head_dim = spec_.head_dim,
               .rotary_dim = spec_.rotary_dim,
               .sequence = context.batch.sequence},
              name);
}

IndexInputs LightningIndexer::build(const BlockContext& context, ValueId input,
                                    ValueId query_latent, ValueId rope_table) const {
  Builder& builder = context.builder;
  builder.place.module = &kIndexerModule;
  const TensorParallel tensor_parallel(builder, context.part());
  const auto gathered = [&](ValueId rows, const std::string& name) {
    return tensor_parallel.sequence_parallel() ? tensor_parallel.enter(rows, name) : rows;
  };
  const ValueId queries =
      linear(builder, query_latent, context.parameter(w_q_), {.detached = true}, "index_queries");
  const ValueId keys =
      linear(builder, input, context.parameter(w_k_), {.detached = true}, "index_keys");
  const ValueId normed =
      layer_norm(builder, keys, context.parameter(k_norm_), context.parameter(k_norm_bias_),
                 {.epsilon = spec_.norm_epsilon}, "index_keys_normed")
          .normalized;
  const ValueId weights =
      linear(builder, input, context.parameter(w_weights_),
             {.output = LinearOutput::accumulation, .detached = true}, "index_weights");
  ValueId turned = build_rotated(context, gathered(normed, "index_keys_all"), rope_table, 1,
                                 "index_keys_rotated");
  const SequenceChunks chunks = chunks_of(context.part());
  if (chunks.ranks > 1) {
    turned = all_gather(builder, turned, {.group = RankGroup::cp, .ranks = chunks.ranks},
                        "index_keys_of_all");
  }
  return {
      .queries = build_rotated(context, queries, rope_table, spec_.heads, "index_queries_rotated"),
      .keys = turned,
      .weights = gathered(weights, "index_weights_all"),
      .starts = context.batch.starts};
}

ValueId LightningIndexer::choose(const BlockContext& context, const IndexInputs& inputs) const {
  return index_topk(context.builder, inputs, {.index = index_of(context), .top_k = spec_.top_k},
                    "chosen_keys");
}

void LightningIndexer::add_loss(const BlockContext& context, const IndexInputs& inputs,
                                ValueId chosen, ValueId queries, ValueId keys,
                                const SparseAttentionAttributes& attention) const {
  if (!context.options.training) return;
  Builder& builder = context.builder;
  builder.place.module = &kIndexerModule;
  const TensorParallel tensor_parallel(builder, context.part());
  const ValueId choice = spec_.has_sparse_loss ? chosen : ValueId{};
  ValueId target;
  if (spec_.loss_coefficient > 0) {
    const ValueId starts = spec_.has_sparse_loss ? ValueId{} : context.batch.starts;
    const bool alone = tensor_parallel.ranks() == 1;
    target = attention_target(builder, queries, keys, choice, starts, attention,
                              alone ? "index_target" : "index_target_here");
    if (!alone) {
      target = sum_over_ranks(builder, target, {.group = RankGroup::tp}, "index_target");
    }
  }
  // Of the mean over all queries, this rank's part.
  const int32_t sharing = tensor_parallel.sequence_parallel() ? tensor_parallel.ranks() : 1;
  const int32_t parts = sharing * attention.chunks.ranks;
  const ValueId loss =
      index_loss(builder, inputs, target, choice,
                 {.index = index_of(context), .coefficient = spec_.loss_coefficient / parts},
                 std::string(name_of(AuxiliaryLossKind::indexer)));
  context.result.auxiliary_losses.push_back({AuxiliaryLossKind::indexer, layer_, loss});
}

double LightningIndexer::forward_flops(int64_t sequence) const {
  const auto queries = static_cast<double>(spec_.query_size());
  const double projections =
      2 * (spec_.query_latent * queries +
           static_cast<double>(spec_.hidden) * (spec_.head_dim + spec_.heads));
  return projections + static_cast<double>(sequence) * queries;  // half of a product
}

}  // namespace troupe
