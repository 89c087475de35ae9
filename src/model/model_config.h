// ModelConfig: the shape of a decoder-only Mixture-of-Experts language model, in the field's terms
// (Megatron's names where it has them). What it computes is decided by these fields alone; which
// Hugging Face architecture it came from only matters when weights are read or written (io/).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace troupe {

struct ModelConfig {
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int32_t num_layers = 0;

  int32_t num_attention_heads = 0;
  int32_t num_query_groups = 0;  // key-value heads
  int32_t kv_channels = 0;       // size of one head
  bool qk_layernorm = false;     // RMS norm of each query and key head, before RoPE
  int32_t sliding_window = 0;    // keys visible to a query, itself included; 0: all before it
  double rotary_base = 10000.0;
  int32_t max_position_embeddings = 0;

  int32_t ffn_hidden_size = 0;  // of dense layers; 0 when there are none
  double norm_epsilon = 1e-5;
  bool tie_embeddings = false;  // the head uses the embedding's weights

  int32_t num_experts = 0;  // 0: a dense model
  int32_t moe_router_topk = 0;
  int32_t moe_ffn_hidden_size = 0;      // of one expert
  bool moe_router_pre_softmax = false;  // softmax over all experts before top-k, not renormalised
  std::vector<bool> moe_layers;         // by layer: has experts

  double moe_aux_loss_coeff = 0.0;
  double moe_z_loss_coeff = 0.0;
  double init_method_std = 0.02;

  std::string hf_architecture;  // "MixtralForCausalLM": how the weights are named outside

  bool is_moe_layer(int32_t layer) const {
    return num_experts > 0 && moe_layers[static_cast<size_t>(layer)];
  }
  int32_t moe_layer_count() const;
  int32_t qkv_size() const { return (num_attention_heads + 2 * num_query_groups) * kv_channels; }
  int32_t attention_size() const { return num_attention_heads * kv_channels; }

  bool operator==(const ModelConfig&) const = default;

  // Refuses an impossible shape (UserError, bad request) and names the field.
  void validate() const;

  // Number of weights; `active` counts top-k of the experts of each MoE layer.
  int64_t parameter_count() const;
  int64_t active_parameter_count() const;

  // Model flops of one sequence of `sequence` tokens, forward and backward (3 x forward; causal
  // attention at half; no router, norms, softmax, or recompute): semantics of Megatron's report.
  double training_flops_per_sequence(int64_t sequence) const;
};

}  // namespace troupe
