// Models that several tests of layouts run.
#pragma once

#include <string>
#include <vector>

#include "program/test_models.h"

namespace troupe::testing {

struct NamedModel {
  std::string name;
  ModelConfig config;
};

// An MoE model of two layers with a shared expert, and one kind of load-balancing loss each: of
// micro-batches, of sequences (its first layer is dense), and of the whole step (with expert bias).
inline std::vector<NamedModel> auxiliary_loss_models(const ModelConfig& base) {
  ModelConfig aux = base;
  aux.moe_aux_loss_coeff = 0.5;
  aux.moe_z_loss_coeff = 0.1;
  aux.moe_shared_expert_intermediate_size = 28;
  aux.moe_shared_expert_gate = true;
  ModelConfig sequences = aux;
  sequences.moe_aux_loss_coeff = 0;
  sequences.moe_seq_aux_loss_coeff = 0.5;
  sequences.moe_layers[0] = false;
  sequences.ffn_hidden_size = 40;
  ModelConfig global = aux;
  global.moe_aux_loss_coeff = 0;
  global.moe_global_aux_loss_coeff = 0.5;
  global.moe_router_enable_expert_bias = true;
  global.moe_router_score_function = ScoreFunction::sigmoid;
  global.moe_router_bias_update_rate = 0.05;
  return {{"aux", aux}, {"seq_aux", sequences}, {"global_aux", global}};
}

}  // namespace troupe::testing
