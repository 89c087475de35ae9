#include "model/batch_inputs.h"

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

template <class Predicate>
bool has_layer(const ModelPart& part, const Predicate& predicate) {
  return has_stage(part, [&](const PipelineStage& stage) {
    for (int32_t i = 0; i < stage.layers; ++i) {
      if (predicate(stage.first_layer + i)) return true;
    }
    return false;
  });
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

void declare_valid_tokens(Builder& builder, const ModelConfig& config, const ModelPart& part,
                          int64_t rows, BatchValues& batch) {
  if (!has_layer(part, [&](int32_t layer) { return config.is_moe_layer(layer); })) return;
  batch.valid.mask = builder.input("valid", DType::i32, {rows});
  batch.valid.count = count_valid_tokens(builder, part, batch.valid.mask);
  batch.first_valid = part.sequence_parallel() ? part.dense().tp * rows : 0;
}

void declare_starts(Builder& builder, const ModelConfig& config, const ModelPart& part,
                    ContextExchange exchange, BatchValues& batch) {
  const auto has_delta_net = [&](int32_t layer) { return config.has_linear_attention(layer); };
  const auto has_attention = [&](int32_t layer) { return !has_delta_net(layer); };
  const auto declare = [&](const SequenceChunks& chunks, const char* name) {
    return builder.input(name, DType::i32, {int64_t{batch.batch} * batch.rows_of(chunks)});
  };
  batch.starts_chunks = queries_of_attention(part, exchange);
  if (has_layer(part, has_attention)) batch.starts = declare(batch.starts_chunks, "starts");
  if (!has_layer(part, has_delta_net)) return;
  const bool is_same = batch.starts.valid() && batch.starts_chunks.ranks == 1;
  batch.whole_starts = is_same ? batch.starts : declare({}, "whole_starts");
}

}  // namespace troupe
