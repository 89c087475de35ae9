#include "passes/loss_weights.h"

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/losses/loss_scale/loss_scale.h"
#include "ops/losses/token_count/token_count.h"

namespace troupe {

LossWeights::LossWeights(Builder& builder, const ModelConfig& config, const ModelPart& part,
                         const TrainingStepOptions& options, DType wide, ValueId loss_scale,
                         const std::function<const BatchValues&(size_t)>& batch_of)
    : builder_(builder),
      config_(config),
      part_(part),
      options_(options),
      wide_(wide),
      loss_scale_(loss_scale) {
  const DType router = router_dtype();
  const double gradient = loss_gradient(options_, part_.layout());
  d_losses_ = {scaled(fill(builder_, gradient, wide_, {1}, "d_loss"))};
  const int32_t depths = config_.mtp_num_layers;
  if (depths > 0) {
    const double weight = gradient * config_.mtp_loss_scaling_factor / depths;
    d_losses_.resize(1 + static_cast<size_t>(depths),
                     scaled(fill(builder_, weight, wide_, {1}, "d_mtp_loss")));
  }
  if (!options_.per_token_loss) {
    d_auxiliary_loss_ = router == wide_
                            ? d_losses_.front()
                            : scaled(fill(builder_, gradient, router, {1}, "d_auxiliary_loss"));
    return;
  }
  for (size_t depth = 0; depth < d_losses_.size(); ++depth) {
    tokens_.push_back(count_step_tokens(depth, batch_of));
  }
  if (options_.ignore_padding) return;  // each micro-batch has its own weight
  const auto numerator =
      static_cast<double>(int64_t{options_.micro_batch_size} * options_.sequence);
  d_auxiliary_loss_ = scaled(token_share(
      builder_, tokens_.front(), {.numerator = numerator, .dtype = router}, "d_auxiliary_loss"));
}

ValueId LossWeights::scaled(ValueId gradient) {
  if (!loss_scale_.valid()) return gradient;
  return scale_gradient(builder_, gradient, loss_scale_, "scaled");
}

std::vector<ValueId> LossWeights::d_auxiliary_losses(const BatchValues& batch) {
  std::vector<ValueId> gradients;
  for (size_t depth = 0; depth < d_losses_.size(); ++depth) {
    const ValueId valid = batch.valid_of(depth).count;
    const bool is_shared = d_auxiliary_loss_.valid() || !valid.valid();
    gradients.push_back(
        is_shared ? d_auxiliary_loss_
                  : scaled(token_share(builder_, tokens_.front(), {.dtype = router_dtype()},
                                       "d_auxiliary_loss", valid)));
  }
  return gradients;
}

ValueId LossWeights::count_step_tokens(size_t depth,
                                       const std::function<const BatchValues&(size_t)>& batch_of) {
  ValueId tokens;
  for (size_t i = 0; i < static_cast<size_t>(options_.micro_batches); ++i) {
    const ValueId mask = batch_of(i).mask_of(depth);
    // The ranks of a tp group have the same tokens.
    if (!mask.valid() || part_.dense().tp != 0) continue;
    const ValueId count = token_count(builder_, mask, "tokens_here");
    tokens = tokens.valid() ? add(builder_, tokens, count, "tokens_so_far") : count;
  }
  if (!tokens.valid()) tokens = fill(builder_, 0, wide_, {1}, "tokens_here");
  if (part_.layout().world_size() == 1) return tokens;
  return sum_over_ranks(builder_, tokens, {.group = RankGroup::world}, "tokens_of_step");
}

}  // namespace troupe
