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

// Gated delta nets in all layers of `base` but the last; their key heads are for ranks to share.
inline NamedModel delta_net_model(ModelConfig base, int32_t key_heads = 8) {
  base.linear_attention_layers.assign(static_cast<size_t>(base.num_layers), true);
  base.linear_attention_layers.back() = false;
  base.linear_conv_kernel_dim = 4;
  base.linear_num_key_heads = key_heads;
  base.linear_num_value_heads = 2 * key_heads;
  base.linear_key_head_dim = 3;
  base.linear_value_head_dim = 5;
  return {"delta_net" + (key_heads == 8 ? "" : "_of_" + std::to_string(key_heads)), base};
}

}  // namespace troupe::testing
