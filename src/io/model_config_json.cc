#include "io/model_config_json.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "base/error.h"
#include "io/json.h"

namespace troupe {
namespace {

constexpr int kMaxStoredConfigDepth = 4;

// Calls visit(name, member) for every field, in the order of the struct.
template <class Config, class Visit>
void for_each_first_field(Config& config, const Visit& visit) {
  visit("vocab_size", config.vocab_size);
  visit("padding_token", config.padding_token);
  visit("hidden_size", config.hidden_size);
  visit("num_layers", config.num_layers);
  visit("num_attention_heads", config.num_attention_heads);
  visit("num_query_groups", config.num_query_groups);
  visit("kv_channels", config.kv_channels);
  visit("qk_layernorm", config.qk_layernorm);
  visit("qk_norm_scope", config.qk_norm_scope);
  visit("add_qkv_bias", config.add_qkv_bias);
  visit("sliding_window", config.sliding_window);
  visit("rotary_base", config.rotary_base);
  visit("max_position_embeddings", config.max_position_embeddings);
  visit("normalization", config.normalization);
  visit("zero_centered_gamma", config.zero_centered_gamma);
  visit("norm_epsilon", config.norm_epsilon);
  visit("ffn_hidden_size", config.ffn_hidden_size);
  visit("activation", config.activation);
  visit("gated_linear_unit", config.gated_linear_unit);
  visit("activation_clamp", config.activation_clamp);
  visit("glu_linear_offset", config.glu_linear_offset);
  visit("add_bias_linear", config.add_bias_linear);
  visit("tie_embeddings", config.tie_embeddings);
  visit("hidden_dropout", config.hidden_dropout);
  visit("attention_dropout", config.attention_dropout);
  visit("num_experts", config.num_experts);
  visit("moe_router_topk", config.moe_router_topk);
  visit("moe_ffn_hidden_size", config.moe_ffn_hidden_size);
  visit("moe_layers", config.moe_layers);
  visit("moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size);
  visit("moe_shared_expert_gate", config.moe_shared_expert_gate);
  visit("moe_router_score_function", config.moe_router_score_function);
  visit("moe_router_pre_softmax", config.moe_router_pre_softmax);
  visit("moe_router_topk_scaling_factor", config.moe_router_topk_scaling_factor);
  visit("moe_router_num_groups", config.moe_router_num_groups);
  visit("moe_router_group_topk", config.moe_router_group_topk);
  visit("moe_router_sinkhorn", config.moe_router_sinkhorn);
  visit("moe_router_enable_expert_bias", config.moe_router_enable_expert_bias);
  visit("moe_router_bias_update_rate", config.moe_router_bias_update_rate);
  visit("moe_router_fp64", config.moe_router_fp64);
  visit("moe_input_jitter_eps", config.moe_input_jitter_eps);
  visit("moe_router_force_load_balancing", config.moe_router_force_load_balancing);
  visit("moe_aux_loss_coeff", config.moe_aux_loss_coeff);
  visit("moe_seq_aux_loss_coeff", config.moe_seq_aux_loss_coeff);
  visit("moe_global_aux_loss_coeff", config.moe_global_aux_loss_coeff);
  visit("moe_z_loss_coeff", config.moe_z_loss_coeff);
  visit("moe_expert_capacity_factor", config.moe_expert_capacity_factor);
  visit("moe_token_drop_policy", config.moe_token_drop_policy);
  visit("moe_pad_expert_input_to_capacity", config.moe_pad_expert_input_to_capacity);
  visit("moe_expert_row_multiple", config.moe_expert_row_multiple);
  visit("init_method_std", config.init_method_std);
  visit("hf_architecture", config.hf_architecture);
}

// Those that the first checkpoints do not have.
template <class Config, class Visit>
void for_each_later_field(Config& config, const Visit& visit) {
  visit("qk_l2_norm", config.qk_l2_norm);
  visit("moe_router_group_scores", config.moe_router_group_scores);
  visit("moe_router_normalize_scores", config.moe_router_normalize_scores);
  visit("window_layers", config.window_layers);
  visit("attention_sinks", config.attention_sinks);
  visit("zero_attention_sinks", config.zero_attention_sinks);
  visit("attention_output_gate", config.attention_output_gate);
  visit("linear_attention_layers", config.linear_attention_layers);
  visit("linear_conv_kernel_dim", config.linear_conv_kernel_dim);
  visit("linear_num_key_heads", config.linear_num_key_heads);
  visit("linear_num_value_heads", config.linear_num_value_heads);
  visit("linear_key_head_dim", config.linear_key_head_dim);
  visit("linear_value_head_dim", config.linear_value_head_dim);
  visit("rotary_percent", config.rotary_percent);
  visit("rotary_interleaved", config.rotary_interleaved);
  visit("rope_scaling_type", config.rope_scaling_type);
  visit("rope_scaling_factor", config.rope_scaling_factor);
  visit("rope_original_positions", config.rope_original_positions);
  visit("rope_scaling_fast", config.rope_scaling_fast);
  visit("rope_scaling_slow", config.rope_scaling_slow);
  visit("rope_round_range", config.rope_round_range);
  visit("rope_mscale", config.rope_mscale);
  visit("rope_mscale_all_dim", config.rope_mscale_all_dim);
  visit("rope_attention_factor", config.rope_attention_factor);
  visit("multi_latent_attention", config.multi_latent_attention);
  visit("q_lora_rank", config.q_lora_rank);
  visit("kv_lora_rank", config.kv_lora_rank);
  visit("qk_head_dim", config.qk_head_dim);
  visit("qk_pos_emb_head_dim", config.qk_pos_emb_head_dim);
  visit("v_head_dim", config.v_head_dim);
  visit("latent_norm_epsilon", config.latent_norm_epsilon);
  visit("dsa_indexer_topk", config.dsa_indexer_topk);
  visit("dsa_indexer_n_heads", config.dsa_indexer_n_heads);
  visit("dsa_indexer_head_dim", config.dsa_indexer_head_dim);
  visit("dsa_indexer_k_norm_epsilon", config.dsa_indexer_k_norm_epsilon);
  visit("dsa_indexer_loss_coeff", config.dsa_indexer_loss_coeff);
  visit("dsa_indexer_use_sparse_loss", config.dsa_indexer_use_sparse_loss);
  visit("moe_router_force_biased", config.moe_router_force_biased);
  visit("embedding_init_method_std", config.embedding_init_method_std);
  visit("init_method_xavier_uniform", config.init_method_xavier_uniform);
  visit("mtp_num_layers", config.mtp_num_layers);
  visit("mtp_loss_scaling_factor", config.mtp_loss_scaling_factor);
  visit("mtp_use_repeated_layer", config.mtp_use_repeated_layer);
}

// Enumerations are written by name.
template <class T>
void write_field(nlohmann::ordered_json& field, const T& value) {
  if constexpr (std::is_enum_v<T>) {
    field = name_of(value);
  } else {
    field = value;
  }
}

template <class T>
bool read_name(const nlohmann::json& field, T& value) {
  if (!field.is_string()) return false;
  constexpr uint8_t kMost = 16;
  for (uint8_t i = 0; i < kMost; ++i) {
    value = static_cast<T>(i);
    if (name_of(value) == field.get_ref<const std::string&>()) return true;
  }
  return false;
}

// Reads a field of exactly the member's type: the library's conversions would take 1e300 for an
// integer, and true for a number.
template <class T>
void read_field(const nlohmann::json& object, const char* name, const std::string& where,
                T& value) {
  if constexpr (std::is_same_v<T, int32_t>) {
    value = static_cast<int32_t>(integer_field(object, name, std::numeric_limits<int32_t>::min(),
                                               std::numeric_limits<int32_t>::max(), where));
  } else {
    const auto found = object.find(name);
    if (found == object.end()) {
      throw_failed(fmt::format("{}: the field \"{}\" is missing", where, name));
    }
    bool fits = false;
    if constexpr (std::is_enum_v<T>) {
      fits = read_name(*found, value);
    } else if constexpr (std::is_same_v<T, double>) {
      fits = found->is_number();
    } else if constexpr (std::is_same_v<T, bool>) {
      fits = found->is_boolean();
    } else if constexpr (std::is_same_v<T, std::string>) {
      fits = found->is_string();
    } else {
      static_assert(std::is_same_v<T, std::vector<bool>>);
      fits = found->is_array() && std::all_of(found->begin(), found->end(),
                                              [](const auto& item) { return item.is_boolean(); });
    }
    if (!fits) {
      throw_failed(fmt::format("{}: the field \"{}\" has a value of the wrong type", where, name));
    }
    if constexpr (!std::is_enum_v<T>) found->get_to(value);
  }
}

}  // namespace

std::string write_model_config(const ModelConfig& config) {
  nlohmann::ordered_json document;
  const auto write = [&](const char* name, const auto& value) {
    write_field(document[name], value);
  };
  for_each_first_field(config, write);
  for_each_later_field(config, write);
  return document.dump(2) + "\n";
}

ModelConfig parse_model_config(std::string_view text, const std::string& where) {
  const nlohmann::json document = parse_json(text, where, kMaxStoredConfigDepth);
  if (!document.is_object()) {
    throw_failed(where + ": the description of the model is not a JSON object.");
  }
  ModelConfig config;
  size_t known = 0;
  const auto read = [&](const char* name, auto& value) {
    read_field(document, name, where, value);
    ++known;
  };
  for_each_first_field(config, read);
  for_each_later_field(config, [&](const char* name, auto& value) {
    if (document.contains(name)) read(name, value);
  });
  if (known != document.size()) {
    throw_failed(where +
                 ": the description of the model has fields that this version does not know.");
  }
  const bool layers_fit =
      config.num_experts <= 0 || config.moe_layers.size() == static_cast<size_t>(config.num_layers);
  if (!layers_fit) throw_failed(where + ": \"moe_layers\" does not name every layer.");
  config.validate();
  return config;
}

}  // namespace troupe
