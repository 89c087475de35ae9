// What goes from stage to stage, and the experts that a micro-batch is to choose or chose.
#pragma once

#include <cstdint>
#include <vector>

#include "model/forward_pass.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "passes/training_step.h"
#include "program/builder.h"

namespace troupe {

// The residual stream of one micro-batch, as stages hand it on.
Shape stream_shape(const ModelConfig& config, const ModelPart& part, int32_t batch,
                   int32_t sequence);

// The experts that one micro-batch must use, as inputs, by layer. Empty when it chooses by itself.
std::vector<ValueId> declare_selections(Builder& builder, const ModelConfig& config,
                                        const ModelPart& part, int64_t tokens, RoutingTrace trace);

// What one stage chose for one micro-batch, as results of the program, by layer.
void record_selections(Program& program, const ModelConfig& config, const ForwardResult& forward,
                       std::vector<ValueId>& selections);

}  // namespace troupe
