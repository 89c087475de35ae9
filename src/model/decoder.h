// Builds the forward pass of a decoder: embedding, layers of attention and experts (or a dense
// MLP), final norm, head and loss. One call emits what one stage of the pipeline does for one
// micro-batch; without a pipeline that is everything.
//
// Residual stream: pre-norm. Each layer's additions are fused with the norm that follows them.
// Activations are [tokens, hidden] with the tokens of one sequence in consecutive rows.
#pragma once

#include "model/forward_pass.h"
#include "model/layer_block.h"
#include "model/model_config.h"
#include "model/parameters.h"
#include "program/builder.h"

namespace troupe {

// Declares the inputs of one micro-batch that are needed. `accumulation` is the accumulation dtype
// of the model.
BatchValues declare_batch(Builder& builder, int32_t batch, int32_t sequence, bool with_tokens,
                          bool with_labels, DType accumulation);

// Emits the tables that all layers and micro-batches of a program share. `rows`: of this rank in
// each sequence; `dtype`: the accumulation dtype of the model.
SharedTables build_tables(Builder& builder, const ModelState& state, int32_t rows, DType dtype);

// Does training draw random numbers (dropout, jitter, random routing)?
bool draws_random_numbers(const ModelConfig& config);

// Emits the forward pass of one stage of state.model, without logits and loss.
ForwardResult build_forward(Builder& builder, const ModelState& state, SharedTables& tables,
                            const BatchValues& batch, const ForwardOptions& options);

struct LossResult {
  ValueId logits;  // [tokens, vocab]
  // [1] the chunk's part of the mean cross-entropy of the micro-batch, nats per token; of a rank of
  // cp of its part of the mean. Invalid without labels.
  ValueId loss;
};

// Emits logits and loss of one chunk.
LossResult build_loss(Builder& builder, const ModelState& state, const Head& head,
                      const Head::Chunk& chunk);

}  // namespace troupe
