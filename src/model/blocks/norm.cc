#include "model/blocks/norm.h"

#include "model/layer_block.h"
#include "ops/norms/layer_norm/layer_norm.h"
#include "ops/norms/rms_norm/rms_norm.h"

namespace troupe {

Norm::Norm(ParameterList& parameters, const ModelConfig& config, const std::string& name)
    : kind_(config.normalization),
      epsilon_(config.norm_epsilon),
      zero_centered_(config.zero_centered_gamma) {
  const ParameterList::Options everywhere{.gradient_class = GradientClass::replicated};
  gain_ = parameters.gain(name, config.hidden_size, everywhere);
  if (kind_ == Normalization::layer_norm) {
    shift_ = parameters.shift(name + "_bias", config.hidden_size, everywhere);
  }
}

ValueId Norm::build(const BlockContext& context, ResidualStream& stream,
                    const std::string& name) const {
  Builder& builder = context.builder;
  const ValueId gamma = context.parameter(gain_);
  const auto leave = [&](const auto& done) {
    stream = {.sum = done.sum, .branch = {}};
    return done.normalized;
  };
  if (kind_ == Normalization::layer_norm) {
    const LayerNormAttributes norm{.epsilon = epsilon_, .zero_centered = zero_centered_};
    const ValueId beta = context.parameter(shift_);
    return leave(stream.branch.valid()
                     ? add_layer_norm(builder, stream.sum, stream.branch, gamma, beta, norm, name)
                     : layer_norm(builder, stream.sum, gamma, beta, norm, name));
  }
  const RmsNormAttributes norm{.epsilon = epsilon_, .zero_centered = zero_centered_};
  return leave(stream.branch.valid()
                   ? add_rms_norm(builder, stream.sum, stream.branch, gamma, norm, name)
                   : rms_norm(builder, stream.sum, gamma, norm, name));
}

}  // namespace troupe
