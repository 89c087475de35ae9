// ModelConfig: the shape of a decoder-only Mixture-of-Experts language model, in the field's terms
// (Megatron's names where it has them). What it computes is decided by these fields alone; which
// Hugging Face architecture it came from only matters when weights are read or written (io/).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/attention/rope/rope_frequencies.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/routing/expert_capacity/expert_capacity.h"
#include "ops/routing/router_topk/router_topk.h"

namespace troupe {

enum class Normalization : uint8_t { rms_norm, layer_norm };

// "RMSNorm", ...; "?" for what is no enumerator.
std::string_view name_of(Normalization normalization);

struct ModelConfig {
  int32_t vocab_size = 0;
  int32_t padding_token = -1;  // its embedding gets no gradient; -1: there is none
  int32_t hidden_size = 0;
  int32_t num_layers = 0;
  // Layers of multi-token prediction (model/mtp_layer.h), of the kind of the last layer and
  // numbered after it, one for each depth, and the weight of their losses together.
  int32_t mtp_num_layers = 0;
  double mtp_loss_scaling_factor = 0.1;
  bool mtp_use_repeated_layer = false;  // all have the parameters and the router of the first

  int32_t num_attention_heads = 0;
  int32_t num_query_groups = 0;  // key-value heads
  int32_t kv_channels = 0;       // size of one head
  bool qk_layernorm = false;     // RMS norm of queries and keys, before RoPE
  QkNormScope qk_norm_scope = QkNormScope::head;
  bool qk_l2_norm = false;             // the same without gains; not together with qk_layernorm
  bool add_qkv_bias = false;           // of the query, key and value projections
  int32_t sliding_window = 0;          // keys visible to a query, itself included; 0: all before it
  std::vector<bool> window_layers;     // by layer: has the window; empty: all layers
  bool attention_sinks = false;        // a learned score of each head that no key has
  bool zero_attention_sinks = false;   // such scores, which stay 0
  bool attention_output_gate = false;  // heads' results times sigmoid(x w)
  int32_t max_position_embeddings = 0;

  // Gated delta nets instead of attention (model/blocks/gated_delta_net.h).
  std::vector<bool> linear_attention_layers;  // by layer; empty: none
  int32_t linear_conv_kernel_dim = 0;
  int32_t linear_num_key_heads = 0;
  int32_t linear_num_value_heads = 0;
  int32_t linear_key_head_dim = 0;
  int32_t linear_value_head_dim = 0;

  // Rotary positions. How they are stretched to contexts longer than the first one:
  // ops/attention/rope/rope_frequencies.h, which rope_scaling() makes of these fields.
  double rotary_base = 10000.0;
  double rotary_percent = 1.0;      // of each head: its first part turns
  bool rotary_interleaved = false;  // pairs are neighbours; of latent attention only
  RopeScalingKind rope_scaling_type = RopeScalingKind::none;
  double rope_scaling_factor = 1.0;
  int32_t rope_original_positions = 0;
  double rope_scaling_fast = 0.0;  // llama3: high_freq_factor; yarn: beta_fast
  double rope_scaling_slow = 0.0;  // llama3: low_freq_factor; yarn: beta_slow
  bool rope_round_range = true;
  // Of yarn. With l(m) = 0.1 m ln(factor) + 1, or 1 where the factor is at most 1, cosines and
  // sines are multiplied by rope_attention_factor; where that is 0 by l(mscale) /
  // l(mscale_all_dim), or l(1) where either is 0. Scores of latent attention are multiplied by
  // l(mscale_all_dim)^2.
  double rope_mscale = 0.0;
  double rope_mscale_all_dim = 0.0;
  double rope_attention_factor = 0.0;

  // Multi-head latent attention (model/blocks/mla_attention.h). Then kv_channels is the size of a
  // query or key head, and qk_layernorm norms the latents.
  bool multi_latent_attention = false;
  int32_t q_lora_rank = 0;           // size of the queries' latent; 0: there is none
  int32_t kv_lora_rank = 0;          // size of the latent of keys and values
  int32_t qk_head_dim = 0;           // of a query or key head: what does not turn,
  int32_t qk_pos_emb_head_dim = 0;   // and what does
  int32_t v_head_dim = 0;            // of a value head
  double latent_norm_epsilon = 0.0;  // 0: norm_epsilon

  // Sparse attention (model/blocks/sparse_mla_attention.h): each query of latent attention reads
  // the keys that an indexer chooses.
  int32_t dsa_indexer_topk = 0;  // keys of a query; 0: all, and there is no indexer
  int32_t dsa_indexer_n_heads = 0;
  int32_t dsa_indexer_head_dim = 0;
  double dsa_indexer_k_norm_epsilon = 0.0;   // 0: norm_epsilon
  double dsa_indexer_loss_coeff = 0.0;       // 0: the indexer does not learn
  bool dsa_indexer_use_sparse_loss = false;  // over the chosen keys; else all that a query sees

  Normalization normalization = Normalization::rms_norm;
  bool zero_centered_gamma = false;  // norms multiply by 1 + gamma
  double norm_epsilon = 1e-5;

  int32_t ffn_hidden_size = 0;  // of dense layers; 0 when there are none
  ActivationFunction activation = ActivationFunction::silu;
  bool gated_linear_unit = true;   // activation(gate) * linear, with twice the rows in the product
  double activation_clamp = 0.0;   // 0: none
  double glu_linear_offset = 0.0;  // added to the linear half
  bool add_bias_linear = false;    // of all other projections: attention output, MLPs, experts
  bool tie_embeddings = false;     // the head uses the embedding's weights
  double hidden_dropout = 0.0;     // of the embedding and of each branch, in training
  double attention_dropout = 0.0;  // of attention probabilities, in training

  int32_t num_experts = 0;  // 0: a dense model
  int32_t moe_router_topk = 0;
  int32_t moe_ffn_hidden_size = 0;                  // of one expert
  std::vector<bool> moe_layers;                     // by layer: has experts
  int32_t moe_shared_expert_intermediate_size = 0;  // 0: no shared expert
  bool moe_shared_expert_gate = false;              // its output times sigmoid(x w)

  // How the router chooses (docs/routing.md).
  ScoreFunction moe_router_score_function = ScoreFunction::softmax;
  bool moe_router_pre_softmax = false;  // softmax over all experts before top-k, not renormalised
  double moe_router_topk_scaling_factor = 1.0;
  int32_t moe_router_num_groups = 0;  // 0: experts are not grouped
  int32_t moe_router_group_topk = 0;
  // A group's score is the sum of this many of its best; 0: top-k over moe_router_group_topk.
  int32_t moe_router_group_scores = 0;
  // Of sigmoid and sqrtsoftplus: the chosen experts' scores are divided by their sum.
  bool moe_router_normalize_scores = true;
  bool moe_router_sinkhorn = false;
  bool moe_router_enable_expert_bias = false;
  double moe_router_bias_update_rate = 1e-3;
  bool moe_router_fp64 = false;  // logits in fp64, also where the model computes in less
  double moe_input_jitter_eps = 0.0;
  bool moe_router_force_load_balancing = false;  // random logits: for measurements only
  // Random logits plus a random bias of each expert with this deviation: for measurements of an
  // imbalance. 0: not; below 0: the bias is drawn once, instead of for every micro-batch.
  double moe_router_force_biased = 0.0;

  // What is minimised beside the loss; 0: not used.
  double moe_aux_loss_coeff = 0.0;
  double moe_seq_aux_loss_coeff = 0.0;
  double moe_global_aux_loss_coeff = 0.0;
  double moe_z_loss_coeff = 0.0;

  // How many rows an expert gets.
  double moe_expert_capacity_factor = 0.0;  // 0: dropless
  DropPolicy moe_token_drop_policy = DropPolicy::probs;
  bool moe_pad_expert_input_to_capacity = false;
  int32_t moe_expert_row_multiple = 1;  // each expert's rows are filled up to a multiple of it

  // How weights start. Matrices, and the bias of a router, are normal with this deviation;
  // projections into the residual stream have it over sqrt(2 num_layers).
  double init_method_std = 0.02;
  double embedding_init_method_std = -1.0;  // of the embedding; below 0: init_method_std
  // All matrices are uniform by Xavier's rule instead, except for an embedding with a deviation of
  // its own.
  bool init_method_xavier_uniform = false;

  std::string hf_architecture;  // "MixtralForCausalLM": how the weights are named outside

  int32_t all_layers() const { return num_layers + mtp_num_layers; }
  // The layer that has the parameters and the router of this one: itself, unless they are shared.
  int32_t owner_of(int32_t layer) const {
    return mtp_use_repeated_layer && layer > num_layers ? num_layers : layer;
  }
  bool is_owner(int32_t layer) const { return owner_of(layer) == layer; }
  // How many layers have those of this one.
  int32_t uses_of(int32_t owner) const {
    return mtp_use_repeated_layer && owner == num_layers ? mtp_num_layers : 1;
  }
  // Layers of multi-token prediction with parameters of their own.
  int32_t own_mtp_layers() const {
    return mtp_use_repeated_layer && mtp_num_layers > 1 ? 1 : mtp_num_layers;
  }
  bool is_moe_layer(int32_t layer) const { return num_experts > 0 && moe_layers[kind_of(layer)]; }
  bool has_window(int32_t layer) const {
    return window_layers.empty() || window_layers[kind_of(layer)];
  }
  bool has_linear_attention(int32_t layer) const {
    return !linear_attention_layers.empty() && linear_attention_layers[kind_of(layer)];
  }
  bool has_sparse_attention() const { return dsa_indexer_topk > 0; }
  int32_t moe_layer_count() const;  // without those of multi-token prediction
  // Of a head: how many elements turn.
  int32_t rotary_dim() const;
  RopeScaling rope_scaling() const;
  // What scores are multiplied by beside 1 / sqrt(d).
  double rope_score_factor() const;
  bool has_shared_expert() const { return moe_shared_expert_intermediate_size > 0; }

  bool operator==(const ModelConfig&) const = default;

  // Refuses an impossible shape (UserError, bad request) and names the field.
  void validate() const;

  // Refuses in the same way a router of a possible shape that cannot learn. Not part of validate():
  // a config.json may say so where other options then make it learn.
  void require_learning_router() const;

 private:
  // The layer of the model that is like this one.
  size_t kind_of(int32_t layer) const {
    return static_cast<size_t>(layer < num_layers ? layer : num_layers - 1);
  }
};

}  // namespace troupe
