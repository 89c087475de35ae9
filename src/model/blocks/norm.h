// The norm before a block or the head: RMSNorm or LayerNorm, fused with the addition to the
// residual stream before it.
#pragma once

#include <cstdint>
#include <string>

#include "model/model_config.h"
#include "model/parameter_spec.h"
#include "program/builder.h"
#include "program/module.h"

namespace troupe {

struct BlockContext;

// The residual stream [tokens, hidden] as two terms: what it was at the last norm, and the branch
// that is still to be added to it, if there is one.
struct ResidualStream {
  ValueId sum;
  ValueId branch;
};

// The norms of a layer, each with the addition before it.
inline constexpr ModuleSpec kNormModule{.recompute = "layernorm", .discards_outputs = true};
inline constexpr ModuleSpec kInputNormModule{
    .part_of = &kNormModule, .offload = "attn_norm", .offloads_outputs = true};
inline constexpr ModuleSpec kFeedForwardNormModule{
    .part_of = &kNormModule, .offload = "mlp_norm", .offloads_outputs = true};

class Norm {
 public:
  Norm() = default;
  // Declares the parameters `name` and, of LayerNorm, `name`_bias.
  Norm(ParameterList& parameters, const ModelConfig& config, const std::string& name);

  // Adds the branch to the stream's sum, and returns the sum's norm.
  ValueId build(const BlockContext& context, ResidualStream& stream, const std::string& name) const;

 private:
  Normalization kind_ = Normalization::rms_norm;
  double epsilon_ = 0;
  bool zero_centered_ = false;
  ParameterId gain_;
  ParameterId shift_;
};

}  // namespace troupe
