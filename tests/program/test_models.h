// Shapes of small models of each kind, for tests of whole programs.
#pragma once

#include "model/model_config.h"

namespace troupe::testing {

inline ModelConfig dense_model(int32_t layers) {
  ModelConfig config;
  config.vocab_size = 96;
  config.hidden_size = 32;
  config.num_layers = layers;
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.kv_channels = 8;
  config.max_position_embeddings = 1024;
  config.ffn_hidden_size = 88;
  config.tie_embeddings = true;
  config.qk_layernorm = true;
  return config;
}

// Multi-latent attention of sizes of which no two are the same.
inline void set_latent_attention(ModelConfig& config) {
  config.multi_latent_attention = true;
  config.num_query_groups = config.num_attention_heads;
  config.q_lora_rank = 20;
  config.kv_lora_rank = 14;
  config.qk_head_dim = 4;
  config.qk_pos_emb_head_dim = 6;
  config.kv_channels = 10;
  config.v_head_dim = 8;
}

inline ModelConfig moe_model(int32_t layers) {
  ModelConfig config = dense_model(layers);
  config.ffn_hidden_size = 0;
  config.tie_embeddings = false;
  config.qk_layernorm = false;
  config.num_experts = 4;
  config.moe_router_topk = 2;
  config.moe_ffn_hidden_size = 24;
  config.moe_layers.assign(static_cast<size_t>(layers), true);
  config.moe_aux_loss_coeff = 0.01;
  config.moe_z_loss_coeff = 0.001;
  return config;
}

// The proportions of Mixtral 8x7B, about 30 times smaller in width.
inline ModelConfig mixtral_like_model(int32_t layers) {
  ModelConfig config = moe_model(layers);
  config.vocab_size = 1000;
  config.hidden_size = 128;
  config.num_attention_heads = 8;
  config.num_query_groups = 2;
  config.kv_channels = 16;
  config.num_experts = 8;
  config.moe_ffn_hidden_size = 448;
  config.moe_z_loss_coeff = 0;
  return config;
}

}  // namespace troupe::testing
