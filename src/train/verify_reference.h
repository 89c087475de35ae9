// Comparison of a model with a reference computed elsewhere (Hugging Face transformers): logits,
// loss, every gradient, the gradient norm, and a short AdamW trajectory.
//
// A reference folder is a Hugging Face model folder with three files more: reference.safetensors
// (input_ids, labels, logits), reference.json (loss, grad_norm, adamw settings and losses) and
// grads/model.safetensors. Errors are UserErrors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/work_report.h"
#include "comm/process_group.h"
#include "model/context_parallel.h"
#include "model/model_part.h"
#include "options/device_options.h"

namespace troupe {

struct ReferenceComparison {
  double loss = 0;
  double loss_ref = 0;
  double logits_max_abs = 0;  // largest absolute difference
  double logits_largest = 0;  // largest absolute reference logit
  // Largest over tensors of |difference| / |reference| (L2 norms); tensors whose reference norm is
  // below 1e-6 of the global norm count with |difference|.
  double grad_worst_rel = 0;
  std::string grad_worst_name;
  // |difference| / |reference| of all gradients as one vector.
  double grad_all_rel = 0;
  double grad_norm = 0;
  double grad_norm_ref = 0;
  double trajectory_max_abs = 0;  // of the losses before each update
  bool oracle_checked = false;
  bool oracle_identical = false;  // every bit of logits, losses and state, after every update
  bool routing_replayed = false;  // see verify_reference()
  bool pass = false;
};

// The differences that are accepted for a compute dtype.
struct ReferenceTolerance {
  double logits = 0;  // absolute; bf16: relative to the largest logit
  double loss = 0;
  double gradient = 0;       // of the worst tensor
  double all_gradients = 0;  // together; fp32 and fp64: any, that of the worst tensor limits it
  double trajectory = 0;
};
ReferenceTolerance reference_tolerance(DType compute_dtype);

// The ranks that share a comparison.
struct VerifyRanks {
  DeviceSpec spec = {};
  std::shared_ptr<const RunLayout> layout = nullptr;  // of spec.ranks ranks; null: one
  ProcessGroup* group = nullptr;                      // of these ranks; null: threads
  ContextExchange context_exchange = ContextExchange::p2p;
};

// Of a reference folder's batch.
struct ReferenceShape {
  int32_t sequences = 0;
  int32_t tokens = 0;  // of each sequence
};
ReferenceShape reference_shape(const std::string& folder);

// The sequences of the batch are divided among the replicas (DP). Sequences that cannot be divided,
// or of which the replicas would count different numbers of labels, are a bad request. Logits and
// gradients are compared where they are: a tensor is put together from the slices of all ranks, and
// of an element that several ranks hold the worst copy counts.
//
// A rank's sequences are one micro-batch; in the interleaved schedule each is one, and sequences of
// which different numbers of labels count are a bad request.
//
// What the ranks have no memory for is refused (does_not_fit) before any is taken.
//
// Where ranks are processes all must call it; only rank 0 gets differences, but `pass` is the same
// everywhere.
//
// `with_oracle` runs everything a second time in the oracle and compares bit by bit.
//
// In bf16 the experts of every token are those that a run in fp32, beside it, has chosen: rounding
// the weights to 8 bits moves router logits, and a token near a tie then goes to another expert.
// Such a token says nothing about the arithmetic, but changes gradients by more than all rounding.
//
// `report` counts the logits, and each update, as one step.
ReferenceComparison verify_reference(const std::string& folder, DType compute_dtype,
                                     bool with_oracle, VerifyRanks ranks,
                                     const WorkReport& report = {});

}  // namespace troupe
