#include "passes/step_inputs.h"

#include "model/batch_inputs.h"

namespace troupe {
Shape stream_shape(const ModelConfig& config, const ModelPart& part, int32_t batch,
                   int32_t sequence) {
  const int64_t tokens = int64_t{batch} * rows_of_sequence(part, sequence);
  return {part.sequence_parallel() ? tokens / part.layout().tp() : tokens, config.hidden_size};
}

std::vector<ValueId> declare_selections(Builder& builder, const ModelConfig& config,
                                        const ModelPart& part, int64_t tokens, RoutingTrace trace) {
  if (trace != RoutingTrace::replayed) return {};
  std::vector<ValueId> selections(static_cast<size_t>(config.all_layers()));
  for (int32_t layer = 0; layer < config.all_layers(); ++layer) {
    if (!config.is_moe_layer(layer) || !part.has_layer(layer)) continue;
    selections[static_cast<size_t>(layer)] =
        builder.input("selected", DType::i32, {tokens, config.moe_router_topk});
  }
  return selections;
}

void record_selections(Program& program, const ModelConfig& config, const ForwardResult& forward,
                       std::vector<ValueId>& selections) {
  selections.resize(static_cast<size_t>(config.all_layers()));
  for (const auto& router : forward.routers) {
    program.add_result(router.selected);
    selections[static_cast<size_t>(router.layer)] = router.selected;
  }
}

}  // namespace troupe
