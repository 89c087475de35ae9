#include "model/blocks/sparse_mla_attention.h"

#include <fmt/format.h>

#include "model/blocks/gqa_attention.h"
#include "model/context_parallel.h"
#include "model/model_state.h"
#include "model/tensor_parallel.h"
#include "ops/attention/join_rotated/join_rotated.h"
#include "ops/attention/sparse_attention/sparse_attention.h"
#include "ops/elementwise/column_groups/column_groups.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/products/head_linear/head_linear.h"

namespace troupe {

SparseMlaAttention::SparseMlaAttention(ParameterList& parameters, const MlaSpec& spec,
                                       const IndexerSpec& indexer, int32_t layer)
    : MlaAttention(parameters, spec, layer),
      top_k_(indexer.top_k),
      indexer_(parameters, indexer, layer) {
  parameters.at(w_kv_up()).products.reset();  // by its heads
}

ValueId SparseMlaAttention::build(const BlockContext& context, ValueId input) const {
  Builder& builder = context.builder;
  const int32_t heads = spec().heads / TensorParallel(builder, context.part()).ranks();
  const Latents latents = build_latents(context, input);
  builder.place.module = &kMlaUpProjectionModule;
  const ValueId queries = build_absorbed_queries(context, latents, heads);
  const ValueId keys = build_keys(context, latents);

  const IndexInputs index = indexer_.build(context, input, latents.query, rope_table_of(context));
  const ValueId chosen = indexer_.choose(context, index);
  const SparseAttentionAttributes attention{.batch = context.batch.batch,
                                            .sequence = context.batch.sequence,
                                            .heads = heads,
                                            .key_dim = spec().key_latent + spec().rotary_dim,
                                            .value_dim = spec().key_latent,
                                            .scale = spec().scale,
                                            .chunks = chunks_of(context.part())};
  indexer_.add_loss(context, index, chosen, queries, keys, attention);

  builder.place.module = &kCoreAttentionModule;
  const ValueId latent =
      sparse_attention(builder, queries, keys, chosen, attention, "context_latent");
  builder.place.module = &kAttentionOutModule;
  const ValueId attended =
      head_linear(builder, latent, context.parameter(w_kv_up()),
                  {.heads = heads, .first = spec().plain_dim, .rows = spec().value_dim}, "context");
  return build_out(context, attended);
}

ValueId SparseMlaAttention::build_absorbed_queries(const BlockContext& context,
                                                   const Latents& latents, int32_t heads) const {
  Builder& builder = context.builder;
  const auto [plain, turning] = split_column_groups(
      builder, build_queries(context, latents),
      {.groups = heads, .widths = {spec().plain_dim, spec().rotary_dim}, .first = 1},
      "queries_apart");
  const ValueId absorbed =
      head_linear(builder, plain, context.parameter(w_kv_up()),
                  {.heads = heads, .rows = spec().plain_dim, .transposed = true}, "queries_latent");
  return join_rotated(builder, absorbed, turning, rope_table_of(context),
                      {.heads = heads,
                       .plain_dim = spec().key_latent,
                       .rotary_dim = spec().rotary_dim,
                       .sequence = context.batch.sequence,
                       .interleaved = spec().rotary_interleaved},
                      "query_rows");
}

ValueId SparseMlaAttention::build_keys(const BlockContext& context, const Latents& latents) const {
  const ValueId keys =
      join_rotated(context.builder, latents.key, latents.shared_key, rope_table_of(context),
                   {.plain_dim = spec().key_latent,
                    .rotary_dim = spec().rotary_dim,
                    .sequence = context.batch.sequence,
                    .interleaved = spec().rotary_interleaved},
                   "key_rows");
  const SequenceChunks chunks = chunks_of(context.part());
  if (chunks.ranks == 1) return keys;
  return all_gather(context.builder, keys, {.group = RankGroup::cp, .ranks = chunks.ranks},
                    "keys_of_all");
}

double SparseMlaAttention::forward_flops(int64_t sequence) const {
  const double pairs =
      most_chosen_pairs(sequence, top_k_) / static_cast<double>(sequence);  // of one query
  const auto whole = static_cast<double>(sequence);
  // As dense attention, where half of all pairs count.
  const double share = top_k_ < sequence ? 2 * pairs / (whole + 1) : 1;
  return projection_flops() + indexer_.forward_flops(sequence) +
         whole * share * static_cast<double>(spec().query_size() + spec().value_size());
}

std::optional<Refusal> SparseMlaAttention::check_layout(const Layout& layout,
                                                        ContextExchange exchange) const {
  if (auto refusal = MlaAttention::check_layout(layout, exchange)) return refusal;
  if (layout.cp() == 1 || exchange == ContextExchange::allgather) return std::nullopt;
  return Refusal{
      .setting = Setting::context_exchange,
      .message = {Setting::context_exchange,
                  fmt::format(" {}: sparse attention needs allgather, since any key of a sequence "
                              "may be chosen.",
                              name_of(exchange))}};
}

}  // namespace troupe
