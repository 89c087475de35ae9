#include "model/forward_pass.h"

namespace troupe {

std::string_view name_of(AuxiliaryLossKind kind) {
  switch (kind) {
    case AuxiliaryLossKind::load_balancing:
      return "load_balancing_loss";
    case AuxiliaryLossKind::seq_load_balancing:
      return "seq_load_balancing_loss";
    case AuxiliaryLossKind::global_load_balancing:
      return "global_load_balancing_loss";
    case AuxiliaryLossKind::z:
      return "z_loss";
    case AuxiliaryLossKind::indexer:
      return "indexer_loss";
  }
  return "?";
}

double coefficient_of(AuxiliaryLossKind kind, const ModelConfig& config, int32_t layer) {
  if (kind == AuxiliaryLossKind::indexer) {
    return config.has_sparse_attention() ? config.dsa_indexer_loss_coeff : 0;
  }
  if (!config.is_moe_layer(layer)) return 0;
  const int32_t uses = config.uses_of(config.owner_of(layer));
  switch (kind) {
    case AuxiliaryLossKind::load_balancing:
      return config.moe_aux_loss_coeff / uses;
    case AuxiliaryLossKind::seq_load_balancing:
      return config.moe_seq_aux_loss_coeff / uses;
    case AuxiliaryLossKind::global_load_balancing:
      return config.moe_global_aux_loss_coeff / uses;
    case AuxiliaryLossKind::z:
      return config.moe_z_loss_coeff;
    case AuxiliaryLossKind::indexer:
      break;
  }
  return 0;
}

}  // namespace troupe
