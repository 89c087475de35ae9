// A layer of multi-token prediction: from the normed state of the depth before (depth 0: the
// model's own) and the embedding of the token d further, a state whose head predicts the token
// after that one (Gloeckle et al., 2024; DeepSeek-V3, section 2.2):
//
//   x_t = W [norm_e(E(token_{t+d})) ; norm_h(h_t)]     then one layer of the decoder, and a norm
//
// Embedding and head are the model's. A layer stands in the model for each depth; all may have the
// parameters of the first (ModelConfig::mtp_use_repeated_layer).
#pragma once

#include <cstdint>

#include "model/blocks/norm.h"
#include "model/parameter_spec.h"

namespace troupe {

struct MtpLayer {
  MtpLayer() = default;
  // Declares its parameters but those of the decoder's layer.
  MtpLayer(ParameterList& parameters, const ModelConfig& config);

  Norm embedding_norm;
  Norm hidden_norm;
  ParameterId projection;  // [hidden, 2 hidden], on all ranks of tp whole: each has rows of its own
  Norm final_norm;
};

}  // namespace troupe
