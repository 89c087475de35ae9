// The inputs that programs have for one micro-batch: tokens, labels and masks, and the experts that
// are to be chosen; each only where one of the rank's stages uses it.
#pragma once

#include <cstdint>
#include <vector>

#include "model/forward_pass.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "passes/training_step.h"
#include "program/builder.h"

namespace troupe {

// Rows of each sequence that this rank and those of its tp group have.
int32_t rows_of_sequence(const ModelPart& part, int32_t sequence);

// The residual stream of one micro-batch, as stages hand it on.
Shape stream_shape(const ModelConfig& config, const ModelPart& part, int32_t batch,
                   int32_t sequence);

// The inputs of one micro-batch that this rank's stages use.
BatchValues declare_batch_of(Builder& builder, const ModelPart& part, int32_t batch,
                             int32_t sequence, bool with_labels, DType accumulation);

// Adds the tokens of the micro-batch that are not padding, where this rank has routers.
void declare_valid_tokens(Builder& builder, const ModelConfig& config, const ModelPart& part,
                          int64_t rows, BatchValues& batch);

// The experts that one micro-batch must use, as inputs, by layer. Empty when it chooses by itself.
std::vector<ValueId> declare_selections(Builder& builder, const ModelConfig& config,
                                        const ModelPart& part, int64_t tokens, RoutingTrace trace);

// What one stage chose for one micro-batch, as results of the program, by layer.
void record_selections(Program& program, const ModelConfig& config, const ForwardResult& forward,
                       std::vector<ValueId>& selections);

}  // namespace troupe
