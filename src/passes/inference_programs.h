// Builds the programs of one rank that do not train: evaluation, and the forward pass to the
// logits, for one batch. In a pipeline a rank has its stages and the messages between.
//
// They share the storage of a ModelState with the training step (passes/step_programs.h). What a
// rank does not have is an invalid ValueId.
#pragma once

#include <memory>
#include <vector>

#include "model/forward_pass.h"
#include "model/model_config.h"
#include "model/parameters.h"
#include "passes/training_step.h"
#include "program/program.h"

namespace troupe {

struct InferenceStep {
  std::unique_ptr<Program> program;
  BatchValues batch;
  // Result: [batch * sequence, vocab], on ranks with the loss; invalid in evaluation programs.
  ValueId logits;
  ValueId loss;  // f64 [1], metric; invalid without labels
  std::vector<LayerMetrics> layers;
  std::vector<ValueId> selected;  // with a routing trace, by layer: as in TrainingStep
};

// Forward pass with loss, without auxiliary losses and without keeping the logits, which are there
// for `loss_chunk_tokens` tokens at a time (0: for all), and with attention within documents where
// it is asked for, and with the products in 8 bits of a training step. What the rank measures is
// what it adds to the batch: over the ranks of one dp coordinate it adds up to the mean loss, and 0
// where the rank adds nothing.
InferenceStep build_evaluation_step(const ModelConfig& config, const ModelState& state,
                                    int32_t batch, int32_t sequence, int32_t loss_chunk_tokens = 0,
                                    bool reset_attention_mask = false,
                                    const PrecisionOptions& precision = {});

// Forward pass to the logits; with_loss adds labels and the loss.
InferenceStep build_logits_step(const ModelConfig& config, const ModelState& state, int32_t batch,
                                int32_t sequence, bool with_loss,
                                RoutingTrace trace = RoutingTrace::none);

}  // namespace troupe
