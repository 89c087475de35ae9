// The inputs of one micro-batch: each only where one of the rank's stages uses it.
#pragma once

#include <cstdint>

#include "model/forward_pass.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "program/builder.h"

namespace troupe {

// Rows of each sequence that this rank and those of its tp group have.
int32_t rows_of_sequence(const ModelPart& part, int32_t sequence);

// Tokens, and labels with masks.
BatchValues declare_batch_of(Builder& builder, const ModelPart& part, int32_t batch,
                             int32_t sequence, bool with_labels, DType accumulation);

// Adds what multi-token prediction needs; `accumulation` as above.
void declare_shifted(Builder& builder, const ModelConfig& config, const ModelPart& part,
                     DType accumulation, BatchValues& batch);

// Adds the tokens of the micro-batch that are not padding, where this rank has routers.
void declare_valid_tokens(Builder& builder, const ModelConfig& config, const ModelPart& part,
                          int64_t rows, BatchValues& batch);

// Adds where documents begin, to which mixers then keep, where this rank has layers.
void declare_starts(Builder& builder, const ModelConfig& config, const ModelPart& part,
                    ContextExchange exchange, BatchValues& batch);

}  // namespace troupe
