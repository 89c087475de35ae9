// What a training step is: the options that it is built with, and the values of its program that
// the host writes before a run (inputs) and reads after it (metrics, results). What a rank does not
// have is an invalid ValueId.
//
// Plain values.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "model/code_metric.h"
#include "model/forward_pass.h"
#include "parallel/layout.h"
#include "passes/offload.h"
#include "passes/overlap.h"
#include "passes/pass_pipeline.h"
#include "passes/precision.h"
#include "passes/recompute.h"
#include "passes/stash.h"
#include "program/program.h"

namespace troupe {

// Whether the experts that tokens choose leave the program as results, or come in as inputs: router
// replay. What one program chose, another can be made to use.
enum class RoutingTrace : uint8_t { none, recorded, replayed };

struct TrainingStepOptions {
  int32_t micro_batch_size = 1;
  int32_t micro_batches = 1;  // of one rank (ModelPart::global_micro_batch)
  int32_t sequence = 0;       // whole; the ranks of cp share it
  double clip_grad = 1.0;     // largest global gradient norm; 0: no clipping
  // A step whose gradients have a larger norm changes nothing.
  double skip_norm = std::numeric_limits<double>::infinity();
  bool scale_loss = false;               // by TrainingStep::loss_scale
  bool decoupled_learning_rate = false;  // of embedding and output layer
  bool decay_qk_norms = false;           // weight decay applies to the norms of queries and keys
  bool count_zero_gradients = false;     // measures TrainingStep::zero_gradients
  bool parameter_norm = false;           // measures TrainingStep::squared_parameter_norm
  uint64_t seed = 0;                     // of dropout, jitter and random routing
  RoutingTrace routing_trace = RoutingTrace::none;
  TokenDispatcher dispatcher = TokenDispatcher::allgather;
  // The step for which the experts' room (RunLayout::expert_room) always suffices: tokens reach the
  // experts in rounds, and the experts' part of each is computed again in the backward pass.
  // Otherwise a step for which it did not suffice says so (TrainingStep::rooms_lacked).
  bool expert_rounds = false;
  ContextExchange context_exchange = ContextExchange::p2p;
  // The loss is the mean over the tokens of the whole step, and not of the means of micro-batches.
  // An auxiliary loss of T tokens then has the weight T / tokens (docs/layouts.md, "Gradients").
  bool per_token_loss = false;
  // Padding is in no loss of the routers, and in no count: neither in those that move the expert
  // bias nor in the metrics of layers. It is routed and computed all the same. Each micro-batch has
  // BatchValues::valid. The routers' losses are then means over the valid tokens of a micro-batch;
  // micro-batches weigh alike, or with a loss per token by their valid tokens.
  bool ignore_padding = false;
  bool reset_attention_mask = false;     // attention within documents: BatchValues::starts
  int64_t gradient_bucket_elements = 0;  // see sum_gradients_over_ranks
  // Gradients are summed as soon as they are complete, and parameters gathered one layer ahead of
  // their use, or as soon as they are updated (passes/communication_order.h).
  bool overlap_gradient_sums = false;
  bool overlap_parameter_gathers = false;
  // Logits and loss are computed, and differentiated at once, for chunks of N tokens of a
  // micro-batch; 0: for all. The head's weight gradients then belong to the forward pass: with tied
  // embeddings the rank must not move other gradients of that weight across it.
  int32_t loss_chunk_tokens = 0;
  OverlapOptions overlap = {};  // merged forwards and backwards: PipelineShape
  PrecisionOptions precision = {};
  RecomputeOptions recompute = {};
  OffloadOptions offload = {};
  StashOptions stash = {};  // not of expert_rounds, which keep nothing of experts
  PassControls passes = {};
};

// The gradient with which the loss of a micro-batch, a mean over its tokens, enters the backward
// pass: 1 / micro-batches of all replicas. It is the only factor: sums over ranks are plain sums.
// With a loss per token it is 1: there the loss itself is divided by the tokens of the step.
inline double loss_gradient(const TrainingStepOptions& options, const Layout& layout) {
  return options.per_token_loss ? 1.0 : 1.0 / (options.micro_batches * layout.dp());
}

// Metrics of a layer over the micro-batches of the step: of a router, where there is one, and
// losses. Of layers that share their parameters there is one, of all of them together.
struct LayerMetrics {
  int32_t layer = 0;
  ValueId counts;   // f64 [experts], sum: rows that each expert received
  ValueId slots;    // f64 [slots], sum: the same by slot, where experts have copies
  ValueId entropy;  // f64 [1], mean: entropy of softmax(router logits), nats
  ValueId tokens;   // f64 [1], sum: those that are no padding, where the others are without it
  struct Loss {
    AuxiliaryLossKind kind;
    ValueId value;  // f64 [1], mean, divided by the coefficient
  };
  std::vector<Loss> losses;  // those that the model uses
};

struct TrainingStep {
  std::unique_ptr<Program> program;
  std::vector<BatchValues> micro_batches;  // tokens with the embedding, labels with the loss
  ValueId learning_rate;                   // f64 [1], input
  ValueId decoupled_learning_rate;  // f64 [1], input, of embedding and output layer; or invalid
  ValueId weight_decay;             // f64 [1], input
  ValueId update_number;  // i64 [1], input: counts updates from 1, for Adam's bias correction
  ValueId loss_scale;     // f64 [1], input: a factor of all gradients until the update; or invalid
  ValueId step_number;    // i64 [1], input: keys random numbers; invalid when the step draws none
  ValueId loss;           // f64 [1], metric: mean over the tokens that count, nats per token
  std::vector<ValueId> mtp_losses;  // the same of multi-token prediction, by depth - 1
  ValueId grad_norm;                // f64 [1], metric: before clipping
  ValueId skipped;  // i32 [1], metric: 1 when the norm was not finite, or above skip_norm, and
                    // nothing was updated
  // f64 [1], metrics, where the experts' room may not suffice: for how many MoE blocks of the step
  // it did not, in which case nothing was updated and nothing else that was measured counts; and
  // the fullest rank's rows, times those of an even load, of the blocks that this rank has.
  ValueId rooms_lacked;
  ValueId fullest_room;
  // f64 [1], metrics of this rank, where rows of experts are stashed: how often pages lacked, in
  // which case rooms_lacked counts it, too; and the most pages that were wanted at a time.
  ValueId pages_lacked;
  ValueId most_pages;
  // f64 [1], metrics, where they are measured: how many elements of the gradients are 0, and the
  // square of the norm of the weights after the step.
  ValueId zero_gradients;
  ValueId squared_parameter_norm;
  CodeMetrics code_metrics;  // where PrecisionOptions asks for them
  std::vector<LayerMetrics> layers;
  // With a routing trace, by micro-batch and layer: i32 [tokens, top-k]. Invalid where a layer has
  // no router, or the rank not the layer.
  std::vector<std::vector<ValueId>> selected;
};

}  // namespace troupe
