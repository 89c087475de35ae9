// With which gradients the losses of a training step enter the backward pass, and by how many
// tokens they are divided: the step's loss is the mean over the micro-batches of all ranks, or over
// their tokens. Those of multi-token prediction share a weight, and are such means over their own
// tokens.
//
// Emits operations at the builder's place, and borrows its arguments.
#pragma once

#include <functional>
#include <vector>

#include "model/model_config.h"
#include "model/model_part.h"
#include "passes/training_step.h"
#include "program/builder.h"

namespace troupe {

class LossWeights {
 public:
  // `wide`: the accumulation dtype. `batch_of`: the values of the rank's micro-batch of a number.
  // `loss_scale`: TrainingStep::loss_scale.
  LossWeights(Builder& builder, const ModelConfig& config, const ModelPart& part,
              const TrainingStepOptions& options, DType wide, ValueId loss_scale,
              const std::function<const BatchValues&(size_t)>& batch_of);

  // The gradient of the loss of a depth; 0 is that of the next token.
  ValueId d_loss(size_t depth) const { return d_losses_[depth]; }
  // With a loss per token, by depth: how many the step has.
  const std::vector<ValueId>& tokens() const { return tokens_; }
  // By depth: the gradient of the auxiliary losses of its layers for a micro-batch.
  std::vector<ValueId> d_auxiliary_losses(const BatchValues& batch);

 private:
  // Auxiliary losses have the type of the router's logits.
  DType router_dtype() const { return config_.moe_router_fp64 ? DType::f64 : wide_; }
  // With the loss scale, where the step has one.
  ValueId scaled(ValueId gradient);
  // Of all ranks, those that count in the loss of this depth.
  ValueId count_step_tokens(size_t depth,
                            const std::function<const BatchValues&(size_t)>& batch_of);

  Builder& builder_;
  const ModelConfig& config_;
  const ModelPart& part_;
  const TrainingStepOptions& options_;
  const DType wide_;
  const ValueId loss_scale_;
  std::vector<ValueId> tokens_;
  std::vector<ValueId> d_losses_;  // by depth
  ValueId d_auxiliary_loss_;       // invalid where each micro-batch has its own
};

}  // namespace troupe
