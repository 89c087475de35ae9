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

void declare_valid_tokens(Builder& builder, const ModelConfig& config, const ModelPart& part,
                          int64_t rows, BatchValues& batch) {
  const bool routes = has_stage(part, [&](const PipelineStage& stage) {
    for (int32_t i = 0; i < stage.layers; ++i) {
      if (config.is_moe_layer(stage.first_layer + i)) return true;
    }
    return false;
  });
  if (!routes) return;
  batch.valid.mask = builder.input("valid", DType::i32, {rows});
  batch.valid.count = count_valid_tokens(builder, part, batch.valid.mask);
  batch.first_valid = part.sequence_parallel() ? part.dense().tp * rows : 0;
}

void declare_starts(Builder& builder, const ModelPart& part, ContextExchange exchange,
                    BatchValues& batch) {
  if (!has_stage(part, [](const PipelineStage& stage) { return stage.layers > 0; })) return;
  batch.starts_chunks = queries_of_attention(part, exchange);
  batch.starts = builder.input("starts", DType::i32, {int64_t{batch.batch} * batch.starts_rows()});
}

}  // namespace troupe
