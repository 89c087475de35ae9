// Builds the forward pass of a decoder: embedding, layers of attention and experts (or a dense
// MLP), final norm, head and loss. One call emits one micro-batch into a program.
//
// Residual stream: pre-norm. Each layer's additions are fused with the norm that follows them.
// Activations are [tokens, hidden] with the tokens of one sequence in consecutive rows.
#pragma once

#include <string>
#include <vector>

#include "model/model_config.h"
#include "model/parameters.h"
#include "program/builder.h"

namespace troupe {

// The token blocks of one micro-batch of `batch` sequences.
struct BatchValues {
  int32_t batch = 0;
  int32_t sequence = 0;
  ValueId tokens;  // i32 [batch * sequence]
  ValueId labels;  // i32 [batch * sequence]; invalid: no loss is built
  ValueId mask;    // accumulation dtype [batch * sequence]: weight of each token in the loss
};

// Declares the inputs of one micro-batch. `accumulation` is the accumulation dtype of the model.
BatchValues declare_batch(Builder& builder, int32_t batch, int32_t sequence, bool with_labels,
                          DType accumulation);

struct ForwardResult {
  ValueId logits;  // [tokens, vocab]
  ValueId
      loss;  // [1] mean cross-entropy of the micro-batch, nats per token; invalid without labels

  // What else is minimised in training, already multiplied by its coefficient; one entry per layer.
  struct AuxiliaryLoss {
    enum class Kind : uint8_t { load_balancing, z_loss } kind;
    int32_t layer;
    double coefficient;
    ValueId value;  // [1]
  };
  std::vector<AuxiliaryLoss> auxiliary_losses;

  struct ExpertLoad {
    int32_t layer;
    ValueId counts;  // i32 [experts]: rows that each expert received
  };
  std::vector<ExpertLoad> expert_loads;
};

// Emits the rotation table that all layers and micro-batches of a program share.
ValueId build_rope_table(Builder& builder, const ModelConfig& config, int32_t sequence,
                         DType dtype);

// Emits the forward pass. `training` adds the auxiliary losses whose coefficients are not zero.
ForwardResult build_forward(Builder& builder, const ModelConfig& config, const ModelState& state,
                            ValueId rope_table, const BatchValues& batch, bool training);

}  // namespace troupe
