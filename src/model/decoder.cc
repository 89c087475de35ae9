#include "model/decoder.h"

#include "model/context_parallel.h"
#include "model/model.h"
#include "model/random_place.h"
#include "model/read_parameter.h"
#include "model/tensor_parallel.h"
#include "ops/add/add.h"
#include "ops/all_gather/all_gather.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/dropout/dropout.h"
#include "ops/embedding/embedding.h"
#include "ops/linear/linear.h"
#include "ops/shift_ids/shift_ids.h"
#include "ops/split_rows/split_rows.h"

namespace troupe {

BatchValues declare_batch(Builder& builder, int32_t batch, int32_t sequence, bool with_tokens,
                          bool with_labels, DType accumulation) {
  const int64_t tokens = static_cast<int64_t>(batch) * sequence;
  BatchValues values;
  values.batch = batch;
  values.sequence = sequence;
  if (with_tokens) values.tokens = builder.input("tokens", DType::i32, {tokens});
  if (with_labels) {
    values.labels = builder.input("labels", DType::i32, {tokens});
    values.mask = builder.input("mask", accumulation, {tokens});
  }
  return values;
}

SharedTables build_tables(Builder& builder, const ModelState& state, int32_t rows, DType dtype) {
  SharedTables tables;
  for (int32_t layer = 0; layer < state.model->config().num_layers; ++layer) {
    state.model->layer(layer).mixer->build_tables(builder, state.part, rows, dtype, tables);
  }
  return tables;
}

bool draws_random_numbers(const ModelConfig& config) {
  return config.hidden_dropout > 0 || config.attention_dropout > 0 ||
         config.moe_input_jitter_eps > 0 || config.moe_router_force_load_balancing ||
         config.moe_router_force_biased != 0;
}

namespace {

// The first row of the vocabulary that the rank holds of this parameter.
int32_t first_vocabulary_row(const ModelState& state, ParameterId id) {
  return static_cast<int32_t>(state.get(id).slice.ranges[0].front().begin);
}

// Each rank looks up the ids that it holds; rows of all others are zero.
ValueId build_embedding(Builder& builder, const ModelConfig& config, const ModelState& state,
                        ValueId tokens) {
  const TensorParallel tensor_parallel(builder, state.part);
  const int32_t first = first_vocabulary_row(state, state.model->embedding());
  const bool has_padding = config.padding_token >= first;
  const ValueId ids = shift_ids(builder, tokens, {.first = first}, "ids");
  const bool whole = tensor_parallel.ranks() == 1;
  const ValueId rows = embedding(
      builder, ids, read_parameter(builder, state, state.model->embedding()),
      {.padding_token = has_padding ? config.padding_token - first : -1}, whole ? "x" : "x_part");
  return tensor_parallel.leave(rows, "x");
}

Head build_head(Builder& builder, const ModelState& state, const BatchValues& batch,
                ValueId final_state, const ForwardOptions& options) {
  const TensorParallel tensor_parallel(builder, state.part);
  const ValueId rows = tensor_parallel.enter(final_state, "head_in_all");
  Head head;
  head.weight = read_parameter(builder, state, state.model->head());
  head.loss_tokens = options.loss_tokens;
  if (batch.labels.valid() && !head.loss_tokens.valid()) {
    head.loss_tokens = count_tokens(builder, state.part, batch.mask);
  }
  const int32_t most = options.loss_chunk_tokens;
  if (most == 0 || builder.value(rows).shape[0] <= most) {
    head.chunks.push_back({.rows = rows, .labels = batch.labels, .mask = batch.mask});
    return head;
  }
  TROUPE_CHECK(batch.labels.valid(), "logits without a loss are wanted whole");
  const auto split = [&](ValueId whole, const std::string& name) {
    return split_rows(builder, whole, {.rows = most}, name);
  };
  const std::vector<ValueId> all_rows = split(rows, "head_in_chunk");
  const std::vector<ValueId> labels = split(batch.labels, "labels_chunk");
  const std::vector<ValueId> masks = split(batch.mask, "mask_chunk");
  for (size_t i = 0; i < all_rows.size(); ++i) {
    head.chunks.push_back({.rows = all_rows[i], .labels = labels[i], .mask = masks[i]});
  }
  return head;
}

}  // namespace

ForwardResult build_forward(Builder& builder, const ModelState& state, SharedTables& tables,
                            const BatchValues& batch, const ForwardOptions& options) {
  const Model& model = *state.model;
  const ModelConfig& config = model.config();
  const PipelineStage& stage = state.part.stage(options.chunk);
  ForwardResult result;
  const BlockContext context{builder, state, tables, batch, options, result};

  const auto drop = [&](ValueId value, RandomPlace place, int32_t layer) {
    if (!options.training || config.hidden_dropout == 0) return value;
    return dropout(
        builder, value, options.step,
        {.seed = options.seed,
         .substream = random_substream(place, layer, options.micro_batch),
         .probability = config.hidden_dropout,
         .origin = row_origin(state.part, batch.sequence, builder.value(value).shape[0])},
        builder.value(value).name + "_dropped");
  };

  ResidualStream stream;
  stream.sum = stage.embedding ? drop(build_embedding(builder, config, state, batch.tokens),
                                      RandomPlace::embedding_dropout, -1)
                               : options.input;
  for (int32_t number = stage.first_layer; number < stage.first_layer + stage.layers; ++number) {
    const DecoderLayer& layer = model.layer(number);
    builder.place.layer = static_cast<int16_t>(number);
    builder.place.module = &kInputNormModule;
    const ValueId attention_input = layer.input_norm.build(context, stream, "attention_in");
    stream.branch = layer.mixer->build(context, attention_input);
    builder.place.module = nullptr;
    stream.branch = drop(stream.branch, RandomPlace::attention_branch_dropout, number);
    builder.place.module = &kFeedForwardNormModule;
    const ValueId ffn_input = layer.feed_forward_norm.build(context, stream, "ffn_in");
    stream.branch = layer.feed_forward->build(context, ffn_input);
    builder.place.module = nullptr;
    stream.branch = drop(stream.branch, RandomPlace::feed_forward_branch_dropout, number);
  }
  if (!stage.loss) {
    result.output =
        stream.branch.valid() ? add(builder, stream.sum, stream.branch, "stage_out") : stream.sum;
    builder.place.layer = -1;
    return result;
  }
  builder.place.layer = -1;
  const ValueId final_state = model.final_norm().build(context, stream, "head_in");
  result.head = build_head(builder, state, batch, final_state, options);
  return result;
}

LossResult build_loss(Builder& builder, const ModelState& state, const Head& head,
                      const Head::Chunk& chunk) {
  const TensorParallel tensor_parallel(builder, state.part);
  LossResult result;
  result.logits = linear(builder, chunk.rows, head.weight, {}, "logits");
  if (!chunk.labels.valid()) return result;
  CrossEntropyInputs inputs{.logits = result.logits,
                            .labels = chunk.labels,
                            .mask = chunk.mask,
                            .tokens = head.loss_tokens};
  if (tensor_parallel.ranks() == 1) {
    result.loss = cross_entropy(builder, inputs, "loss").loss;
    return result;
  }
  inputs.labels =
      shift_ids(builder, chunk.labels, {.first = first_vocabulary_row(state, state.model->head())},
                "label_ids");
  const ValueId part = cross_entropy_part(builder, inputs.logits, inputs.labels, "loss_part");
  const ValueId parts = all_gather(
      builder, part, {.group = RankGroup::tp, .ranks = tensor_parallel.ranks()}, "loss_parts");
  result.loss = cross_entropy_of_parts(builder, inputs, parts, "loss").loss;
  return result;
}

}  // namespace troupe
