#include "model/mtp_layer.h"

namespace troupe {

MtpLayer::MtpLayer(ParameterList& parameters, const ModelConfig& config)
    : embedding_norm(parameters, config, "mtp_embedding_norm"),
      hidden_norm(parameters, config, "mtp_hidden_norm"),
      projection(parameters.weight(
          "w_mtp", {config.hidden_size, 2 * int64_t{config.hidden_size}},
          {.gradient_class = GradientClass::replicated, .products = ProductGroup::none})),
      final_norm(parameters, config, "mtp_final_norm") {}

}  // namespace troupe
