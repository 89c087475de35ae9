#include "model/batch_inputs.h"

#include "model/blocks/gated_delta_net.h"
#include "model/decoder.h"

namespace troupe {
namespace {

// Which of a rank's stages, of those that it has at all.
template <class Predicate>
bool has_stage(const ModelPart& part, const Predicate& predicate) {
  for (int32_t chunk = 0; chunk < part.partition().chunks; ++chunk) {
    if (predicate(part.stage(chunk))) return true;
  }
  return false;
}

// The same for layers, those of multi-token prediction included.
template <class Predicate>
bool has_layer(const ModelConfig& config, const ModelPart& part, const Predicate& predicate) {
  for (int32_t layer = 0; layer < config.all_layers(); ++layer) {
    if (part.has_layer(layer) && predicate(layer)) return true;
  }
  return false;
}

}  // namespace

int32_t rows_of_sequence(const ModelPart& part, int32_t sequence) {
  return sequence / part.layout().cp();
}

BatchValues declare_batch_of(Builder& builder, const ModelPart& part, int32_t batch,
                             int32_t sequence, bool with_labels, DType accumulation) {
  const bool embeds = has_stage(part, [](const PipelineStage& stage) { return stage.embedding; });
  const bool has_loss = has_stage(part, [](const PipelineStage& stage) { return stage.loss; });
  BatchValues values = declare_batch(builder, batch, rows_of_sequence(part, sequence), embeds,
                                     with_labels && has_loss, accumulation);
  values.chunks = chunks_of(part);
  return values;
}

void declare_shifted(Builder& builder, const ModelConfig& config, const ModelPart& part,
                     DType accumulation, BatchValues& batch) {
  for (int32_t i = 0; i < config.mtp_num_layers; ++i) {
    const bool embeds = part.has_layer(config.num_layers + i);
    const BatchValues values = declare_batch(builder, batch.batch, batch.sequence, embeds,
                                             batch.labels.valid(), accumulation);
    batch.shifted.push_back(
        {.tokens = values.tokens, .labels = values.labels, .mask = values.mask});
  }
}

void declare_valid_tokens(Builder& builder, const ModelConfig& config, const ModelPart& part,
                          int64_t rows, BatchValues& batch) {
  batch.first_valid = part.sequence_parallel() ? part.dense().tp * rows : 0;
  const auto declare = [&](ValidTokens& valid) {
    valid.mask = builder.input("valid", DType::i32, {rows});
    valid.count = count_valid_tokens(builder, part, valid.mask);
  };
  const auto routes = [&](int32_t layer) {
    return layer < config.num_layers && config.is_moe_layer(layer);
  };
  if (has_layer(config, part, routes)) declare(batch.valid);
  for (BatchValues::Shifted& further : batch.shifted) {
    if (further.tokens.valid() && config.is_moe_layer(config.num_layers)) declare(further.valid);
  }
}

void declare_starts(Builder& builder, const ModelConfig& config, const ModelPart& part,
                    ContextExchange exchange, BatchValues& batch) {
  const auto has_delta_net = [&](int32_t layer) { return config.has_linear_attention(layer); };
  const auto has_attention = [&](int32_t layer) { return !has_delta_net(layer); };
  const auto declare = [&](const SequenceChunks& chunks, const char* name) {
    return builder.input(name, DType::i32, {int64_t{batch.batch} * batch.rows_of(chunks)});
  };
  batch.starts_chunks = queries_of_attention(part, exchange);
  if (has_layer(config, part, has_attention)) batch.starts = declare(batch.starts_chunks, "starts");
  if (!has_layer(config, part, has_delta_net)) return;
  batch.delta_chunks = rows_of_delta_nets(config.linear_num_key_heads, part);
  const bool are_whole = batch.delta_chunks.ranks == 1 && batch.starts_chunks.ranks == 1;
  batch.delta_starts = batch.starts.valid() && are_whole
                           ? batch.starts
                           : declare(batch.delta_chunks, "delta_starts");
}

}  // namespace troupe
