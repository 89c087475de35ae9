#include "model/context_parallel.h"

#include "ops/attention/context_attention/context_attention.h"
#include "ops/elementwise/split_columns/split_columns.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/exchange_heads/exchange_heads.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/losses/token_count/token_count.h"

namespace troupe {
namespace {

// This rank's share of the heads, of whole sequences.
AttentionHeads exchange_for_heads(Builder& builder, const AttentionHeads& heads,
                                  const ExchangeHeadsAttributes& exchange) {
  if (heads.are_fused()) {
    const ValueId rows = sequence_to_heads(builder, heads.queries, exchange, "qkv_by_heads");
    return {rows, rows};
  }
  ExchangeHeadsAttributes queries = exchange;
  queries.groups = queries.value_dim = 0;
  ExchangeHeadsAttributes keys = exchange;
  keys.heads = 0;
  return {sequence_to_heads(builder, heads.queries, queries, "queries_by_heads"),
          sequence_to_heads(builder, heads.keys, keys, "keys_by_heads")};
}

// Attention over whole sequences with this rank's share of the heads.
ValueId attend_by_heads(Builder& builder, const SequenceChunks& chunks, const AttentionHeads& heads,
                        const AttentionExtras& extras, const AttentionAttributes& attributes,
                        const std::string& name) {
  ExchangeHeadsAttributes exchange{.chunks = chunks,
                                   .batch = attributes.batch,
                                   .sequence = attributes.sequence * chunks.ranks,
                                   .heads = attributes.heads,
                                   .groups = attributes.groups,
                                   .head_dim = attributes.head_dim,
                                   .value_dim = attributes.value_dim};
  AttentionAttributes own = attributes;
  own.sequence = exchange.sequence;
  own.heads /= chunks.ranks;
  own.groups /= chunks.ranks;
  own.first_head += chunks.rank * own.heads;
  if (own.all_heads == 0) own.all_heads = attributes.heads;
  if (extras.sinks.valid()) own.first_sink += chunks.rank * own.heads;
  const ValueId context = attention(builder, exchange_for_heads(builder, heads, exchange), extras,
                                    own, name + "_by_heads");
  exchange.groups = 0;
  exchange.head_dim = attributes.value_size();
  exchange.value_dim = 0;
  return heads_to_sequence(builder, context, exchange, name);
}

}  // namespace

std::string_view name_of(ContextExchange exchange) {
  switch (exchange) {
    case ContextExchange::p2p:
      return "p2p";
    case ContextExchange::a2a:
      return "a2a";
    case ContextExchange::allgather:
      return "allgather";
  }
  return "?";
}

SequenceChunks chunks_of(const ModelPart& part) {
  return {.ranks = part.layout().cp(), .rank = part.dense().cp};
}

RowOrigin row_origin(const ModelPart& part, int32_t sequence, int64_t rows) {
  const int64_t first = part.sequence_parallel() ? part.dense().tp * rows : 0;
  return {
      .first_row = static_cast<int32_t>(first), .sequence = sequence, .chunks = chunks_of(part)};
}

ValueId attend_over_context(Builder& builder, const ModelPart& part, ContextExchange exchange,
                            const AttentionHeads& heads, const AttentionExtras& extras,
                            const AttentionAttributes& attributes, const std::string& name) {
  const SequenceChunks chunks = chunks_of(part);
  if (chunks.ranks == 1) return attention(builder, heads, extras, attributes, name);
  if (exchange == ContextExchange::a2a) {
    return attend_by_heads(builder, chunks, heads, extras, attributes, name);
  }
  AttentionHeads apart = heads;
  if (heads.are_fused()) {
    const SplitColumnsResult rows =
        split_columns(builder, heads.queries, {.columns = attributes.query_row()}, "queries");
    apart = {.queries = rows.first, .keys = rows.rest};
  }
  if (exchange == ContextExchange::p2p) {
    return ring_attention(builder, apart, extras, {attributes, chunks}, name);
  }
  apart.keys = all_gather(builder, apart.keys, {.group = RankGroup::cp, .ranks = chunks.ranks},
                          "keys_of_all");
  return context_attention(builder, apart, extras, {attributes, chunks}, name);
}

SequenceChunks queries_of_attention(const ModelPart& part, ContextExchange exchange) {
  return exchange == ContextExchange::a2a ? SequenceChunks{} : chunks_of(part);
}

ValueId count_tokens(Builder& builder, const ModelPart& part, ValueId mask) {
  if (part.layout().cp() == 1) return token_count(builder, mask, "tokens");
  const ValueId own = token_count(builder, mask, "tokens_here");
  return sum_over_ranks(builder, own, {.group = RankGroup::cp}, "tokens_of_all");
}

ValueId count_valid_tokens(Builder& builder, const ModelPart& part, ValueId mask) {
  const RankGroup group = part.sequence_parallel() ? RankGroup::tp_cp : RankGroup::cp;
  if (part.layout().place_in(group, part.rank).ranks == 1) {
    return token_count(builder, mask, "valid_tokens");
  }
  const ValueId own = token_count(builder, mask, "valid_tokens_here");
  return sum_over_ranks(builder, own, {.group = group}, "valid_tokens");
}

}  // namespace troupe
