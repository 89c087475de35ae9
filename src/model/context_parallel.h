// How the ranks of a cp group share each sequence: which rows are whose, and how attention
// exchanges what it needs of the others.
//
// Each rank has two chunks of every sequence, one from either end (program/row_origin.h). All but
// attention and the sums over a micro-batch's tokens works on rows alone. Functions emit at the
// builder's place; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "model/model_part.h"
#include "ops/attention/attention/attention.h"
#include "program/builder.h"
#include "program/row_origin.h"

namespace troupe {

// Results are those of one rank, except for the order of sums.
enum class ContextExchange : uint8_t {
  p2p,        // keys and values pass round a ring, one rank's at a time
  a2a,        // heads for tokens and back: each rank attends over whole sequences with its heads
  allgather,  // every rank gets all keys and values
};
std::string_view name_of(ContextExchange exchange);

// This rank's chunks of each sequence.
SequenceChunks chunks_of(const ModelPart& part);

// Where the rows of an activation of this rank lie in the whole micro-batch: `rows` of them, with
// `sequence` rows of the cp rank in each sequence. Between the products that TP shares a rank has
// its block of the rows when there is sequence parallelism.
RowOrigin row_origin(const ModelPart& part, int32_t sequence, int64_t rows);

// Emits the attention of this rank's rows over whole sequences. `attributes` are those of this
// rank: its rows of each sequence, the heads that TP leaves it, whose sinks the extras have; their
// `starts` are of the rows that queries_of_attention() says. Returns rows of its query heads.
ValueId attend_over_context(Builder& builder, const ModelPart& part, ContextExchange exchange,
                            const AttentionHeads& heads, const AttentionExtras& extras,
                            const AttentionAttributes& attributes, const std::string& name);

// The rows of each sequence whose queries attend on this rank: its own, but with a2a all of them.
SequenceChunks queries_of_attention(const ModelPart& part, ContextExchange exchange);

// Emits the sum of the mask over the whole micro-batch, [1].
ValueId count_tokens(Builder& builder, const ModelPart& part, ValueId mask);

// The same of the mask of the rows that this rank's routers see, of which the ranks of tp have a
// block each where there is sequence parallelism.
ValueId count_valid_tokens(Builder& builder, const ModelPart& part, ValueId mask);

}  // namespace troupe
