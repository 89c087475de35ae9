// Builds the complete programs of one rank: the training step (every micro-batch forward and
// backward, gradient norm and clipping, optimizer), evaluation, and plain inference.
//
// Every rank has a program of its own, for its part of the model (ModelState::part). In a pipeline
// it does what the schedule's table gives it, in that order: stages forward and backward, and the
// messages between stages. Gradients are summed over the ranks once, after the last micro-batch,
// with the divisors of one rank that ran all micro-batches; so are the metrics. What is read after
// a run is therefore that of the whole step, on every rank alike, except what only some ranks have:
// see each member. What a rank does not have is an invalid ValueId.
//
// All programs built on one ModelState share its storage. The returned structures name the values
// that the host writes before a run (inputs) and reads after it (metrics, results).
#pragma once

#include <memory>
#include <vector>

#include "model/decoder.h"
#include "model/parameters.h"
#include "passes/training_step.h"
#include "program/program.h"

namespace troupe {

TrainingStep build_training_step(const ModelConfig& config, const ModelState& state,
                                 const TrainingStepOptions& options);

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
// for `loss_chunk_tokens` tokens at a time (0: for all). What the rank
// measures is what it adds to the batch: over the ranks of one dp coordinate it adds up to the mean
// loss, and 0 where the rank adds nothing.
InferenceStep build_evaluation_step(const ModelConfig& config, const ModelState& state,
                                    int32_t batch, int32_t sequence, int32_t loss_chunk_tokens = 0);

// Forward pass to the logits; with_loss adds labels and the loss.
InferenceStep build_logits_step(const ModelConfig& config, const ModelState& state, int32_t batch,
                                int32_t sequence, bool with_loss,
                                RoutingTrace trace = RoutingTrace::none);

}  // namespace troupe
