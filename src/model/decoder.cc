#include "model/decoder.h"

#include "model/context_parallel.h"
#include "model/model.h"
#include "model/random_place.h"
#include "model/tensor_parallel.h"
#include "ops/elementwise/add/add.h"
#include "ops/elementwise/dropout/dropout.h"
#include "ops/elementwise/split_columns/split_columns.h"
#include "ops/elementwise/split_rows/split_rows.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/losses/cross_entropy/cross_entropy.h"
#include "ops/products/embedding/embedding.h"
#include "ops/products/linear/linear.h"
#include "ops/products/shift_ids/shift_ids.h"

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
  for (int32_t layer = 0; layer < state.model->config().all_layers(); ++layer) {
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

// What logits and loss of one depth are made of, `most` tokens at a time (0: all). `loss_tokens` is
// invalid where the loss is divided by the tokens of the micro-batch.
Head build_head(Builder& builder, const ModelState& state, ValueId weight, const Head::Chunk& whole,
                ValueId loss_tokens, int32_t most) {
  Head head{.weight = weight, .loss_tokens = loss_tokens, .chunks = {whole}};
  if (whole.labels.valid() && !head.loss_tokens.valid()) {
    head.loss_tokens = count_tokens(builder, state.part, whole.mask);
  }
  if (most == 0 || builder.value(whole.rows).shape[0] <= most) return head;
  head.chunks.clear();
  TROUPE_CHECK(whole.labels.valid(), "logits without a loss are wanted whole");
  const auto split = [&](ValueId value, const std::string& name) {
    return split_rows(builder, value, {.rows = most}, name);
  };
  const std::vector<ValueId> all_rows = split(whole.rows, "head_in_chunk");
  const std::vector<ValueId> labels = split(whole.labels, "labels_chunk");
  const std::vector<ValueId> masks = split(whole.mask, "mask_chunk");
  for (size_t i = 0; i < all_rows.size(); ++i) {
    head.chunks.push_back({.rows = all_rows[i], .labels = labels[i], .mask = masks[i]});
  }
  return head;
}

// Emits one stage's forward pass for one micro-batch.
class StageForward {
 public:
  explicit StageForward(const BlockContext& context)
      : context_(context),
        builder_(context.builder),
        model_(*context.state.model),
        config_(model_.config()),
        batch_(context.batch),
        options_(context.options) {}

  void build() {
    const PipelineStage& stage = context_.part().stage(options_.chunk);
    ResidualStream stream;
    stream.sum = stage.embedding ? embed(batch_.tokens, -1) : options_.input;
    for (int32_t layer = stage.first_layer; layer < stage.first_layer + stage.layers; ++layer) {
      build_layer(context_, layer, stream);
    }
    if (stage.mtp_layers == 0 && !stage.loss) {
      context_.result.output = stream.branch.valid()
                                   ? add(builder_, stream.sum, stream.branch, "stage_out")
                                   : stream.sum;
      return;
    }
    builder_.place.layer = -1;
    std::vector<ValueId> states = normed_states(stage, stream);
    if (predicts_further()) build_predictions(stage, states);
    leave(stage, states);
  }

 private:
  // Layers of multi-token prediction are there for training alone.
  bool predicts_further() const { return options_.training && config_.mtp_num_layers > 0; }

  ValueId drop(ValueId value, RandomPlace place, int32_t layer) const {
    if (!options_.training || config_.hidden_dropout == 0) return value;
    const Value& dropped = builder_.value(value);
    return dropout(builder_, value, options_.step,
                   {.seed = options_.seed,
                    .substream = random_substream(place, layer, options_.micro_batch),
                    .probability = config_.hidden_dropout,
                    .origin = row_origin(context_.part(), batch_.sequence, dropped.shape[0])},
                   dropped.name + "_dropped");
  }

  // Each rank looks up the ids that it holds; rows of all others are zero.
  ValueId embed(ValueId tokens, int32_t layer) const {
    const TensorParallel tensor_parallel(builder_, context_.part());
    const int32_t first = first_vocabulary_row(context_.state, model_.embedding());
    const bool has_padding = config_.padding_token >= first;
    const ValueId ids = shift_ids(builder_, tokens, {.first = first}, "ids");
    const bool whole = tensor_parallel.ranks() == 1;
    const ValueId rows =
        embedding(builder_, ids, context_.parameter(model_.embedding()),
                  {.padding_token = has_padding ? config_.padding_token - first : -1},
                  whole ? "x" : "x_part");
    return drop(tensor_parallel.leave(rows, "x"), RandomPlace::embedding_dropout, layer);
  }

  void build_layer(const BlockContext& context, int32_t number, ResidualStream& stream) const {
    const DecoderLayer& layer = model_.layer(number);
    builder_.place.layer = static_cast<int16_t>(number);
    builder_.place.module = &kInputNormModule;
    const ValueId attention_input = layer.input_norm.build(context, stream, "attention_in");
    stream.branch = layer.mixer->build(context, attention_input);
    builder_.place.module = nullptr;
    stream.branch = drop(stream.branch, RandomPlace::attention_branch_dropout, number);
    builder_.place.module = &kFeedForwardNormModule;
    const ValueId ffn_input = layer.feed_forward_norm.build(context, stream, "ffn_in");
    stream.branch = layer.feed_forward->build(context, ffn_input);
    builder_.place.module = nullptr;
    stream.branch = drop(stream.branch, RandomPlace::feed_forward_branch_dropout, number);
  }

  // That of the model, and those of the depths that the stages before have.
  std::vector<ValueId> normed_states(const PipelineStage& stage, ResidualStream& stream) const {
    if (stage.ends_decoder()) return {model_.final_norm().build(context_, stream, "head_in")};
    if (!predicts_further()) return {stream.sum};
    const int64_t rows = builder_.value(stream.sum).shape[0] / (1 + stage.first_mtp_layer);
    return split_rows(builder_, stream.sum, {.rows = rows}, "head_in");
  }

  // Appends those of the stage's depths.
  void build_predictions(const PipelineStage& stage, std::vector<ValueId>& states) const {
    for (int32_t depth = 0; depth < stage.mtp_layers; ++depth) {
      const int32_t i = stage.first_mtp_layer + depth;
      const int32_t number = config_.num_layers + i;
      const MtpLayer& own = model_.mtp_layer(i);
      builder_.place.layer = static_cast<int16_t>(number);
      ResidualStream further = {embed(batch_.shifted[static_cast<size_t>(i)].tokens, number), {}};
      ResidualStream before = {states.back(), {}};
      const ValueId token = own.embedding_norm.build(context_, further, "mtp_embedding");
      const ValueId hidden = own.hidden_norm.build(context_, before, "mtp_hidden");
      const ValueId both = join_columns(builder_, token, hidden, "mtp_in");
      ResidualStream stream = {
          linear(builder_, both, context_.parameter(own.projection), {}, "mtp_x"), {}};
      BatchValues batch = batch_;
      batch.valid = batch_.shifted[static_cast<size_t>(i)].valid;
      build_layer({builder_, context_.state, context_.tables, batch, options_, context_.result},
                  number, stream);
      states.push_back(own.final_norm.build(context_, stream, "mtp_head_in"));
    }
  }

  void leave(const PipelineStage& stage, const std::vector<ValueId>& states) const {
    builder_.place.layer = -1;
    if (stage.loss) return build_heads(states);
    context_.result.output =
        states.size() > 1 ? join_rows(builder_, states, "stage_out") : states.front();
  }

  // For each depth.
  void build_heads(const std::vector<ValueId>& states) const {
    builder_.place.layer = -1;
    const TensorParallel tensor_parallel(builder_, context_.part());
    std::vector<Head::Chunk> all;
    for (size_t depth = 0; depth < states.size(); ++depth) {
      all.push_back({.rows = tensor_parallel.enter(states[depth], "head_in_all"),
                     .labels = depth == 0 ? batch_.labels : batch_.shifted[depth - 1].labels,
                     .mask = batch_.mask_of(depth)});
    }
    const ValueId weight = context_.parameter(model_.head());
    for (size_t depth = 0; depth < states.size(); ++depth) {
      const ValueId tokens = options_.loss_tokens.empty() ? ValueId{} : options_.loss_tokens[depth];
      context_.result.heads.push_back(build_head(builder_, context_.state, weight, all[depth],
                                                 tokens, options_.loss_chunk_tokens));
    }
  }

  const BlockContext& context_;
  Builder& builder_;
  const Model& model_;
  const ModelConfig& config_;
  const BatchValues& batch_;
  const ForwardOptions& options_;
};

}  // namespace

ForwardResult build_forward(Builder& builder, const ModelState& state, SharedTables& tables,
                            const BatchValues& batch, const ForwardOptions& options) {
  ForwardResult result;
  const BlockContext context{builder, state, tables, batch, options, result};
  StageForward(context).build();
  return result;
}

LossResult build_loss(Builder& builder, const ModelState& state, const Head& head,
                      const Head::Chunk& chunk) {
  const TensorParallel tensor_parallel(builder, state.part);
  LossResult result;
  result.logits = linear(builder, chunk.rows, head.weight, {.quantizable = false}, "logits");
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
