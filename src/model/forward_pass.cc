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
  }
  return "?";
}

double coefficient_of(AuxiliaryLossKind kind, const ModelConfig& config) {
  switch (kind) {
    case AuxiliaryLossKind::load_balancing:
      return config.moe_aux_loss_coeff;
    case AuxiliaryLossKind::seq_load_balancing:
      return config.moe_seq_aux_loss_coeff;
    case AuxiliaryLossKind::global_load_balancing:
      return config.moe_global_aux_loss_coeff;
    case AuxiliaryLossKind::z:
      return config.moe_z_loss_coeff;
  }
  return 0;
}

}  // namespace troupe
