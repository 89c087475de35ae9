#include "passes/step_inputs.h"

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

bool has_layer(const ModelPart& part, int32_t layer) {
  return part.partition().rank_of_layer(layer) == part.dense().pp;
}

}  // namespace

int32_t rows_of_sequence(const ModelPart& part, int32_t sequence) {
  return sequence / part.layout().cp();
}

Shape stream_shape(const ModelConfig& config, const ModelPart& part, int32_t batch,
                   int32_t sequence) {
  const int64_t tokens = int64_t{batch} * rows_of_sequence(part, sequence);
  return {part.sequence_parallel() ? tokens / part.layout().tp() : tokens, config.hidden_size};
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

std::vector<ValueId> declare_selections(Builder& builder, const ModelConfig& config,
                                        const ModelPart& part, int64_t tokens, RoutingTrace trace) {
  if (trace != RoutingTrace::replayed) return {};
  std::vector<ValueId> selections(static_cast<size_t>(config.num_layers));
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe_layer(layer) || !has_layer(part, layer)) continue;
    selections[static_cast<size_t>(layer)] =
        builder.input("selected", DType::i32, {tokens, config.moe_router_topk});
  }
  return selections;
}

void record_selections(Program& program, const ModelConfig& config, const ForwardResult& forward,
                       std::vector<ValueId>& selections) {
  selections.resize(static_cast<size_t>(config.num_layers));
  for (const auto& router : forward.routers) {
    program.add_result(router.selected);
    selections[static_cast<size_t>(router.layer)] = router.selected;
  }
}

}  // namespace troupe
