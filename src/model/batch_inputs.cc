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
  const bool embeds =
      has_stage(part, [](const PipelineStage& each) { return each.mtp_layers > 0; });
  for (int32_t i = 0; i < config.mtp_num_layers; ++i) {
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
  const bool routes = has_stage(part, [&](const PipelineStage& stage) {
    for (int32_t i = 0; i < stage.layers; ++i) {
      if (config.is_moe_layer(stage.first_layer + i)) return true;
    }
    return false;
  });
  if (routes) declare(batch.valid);
  for (BatchValues::Shifted& further : batch.shifted) {
    if (further.tokens.valid() && config.is_moe_layer(config.num_layers)) declare(further.valid);
  }
}

void declare_starts(Builder& builder, const ModelPart& part, ContextExchange exchange,
                    BatchValues& batch) {
  const auto attends = [](const PipelineStage& stage) {
    return stage.layers + stage.mtp_layers > 0;
  };
  if (!has_stage(part, attends)) return;
  batch.starts_chunks = queries_of_attention(part, exchange);
  batch.starts = builder.input("starts", DType::i32, {int64_t{batch.batch} * batch.starts_rows()});
}

}  // namespace troupe
