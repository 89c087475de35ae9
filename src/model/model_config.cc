#include "model/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fmt/format.h>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "model/model_problems.h"
#include "ops/attention/causal_conv/causal_conv.h"
#include "ops/attention/rope/length_factor.h"

namespace troupe {
namespace {

void require_positive(int64_t value, const char* field) {
  if (value <= 0) {
    throw_bad_request(
        fmt::format("Model configuration: {} must be positive, it is {}.", field, value));
  }
}

// Sizes above this cannot be meant, and products of three of them would overflow.
constexpr int32_t kLargestExtent = 1 << 24;

void require_sensible(int32_t value, const char* field) {
  require_positive(value, field);
  if (value > kLargestExtent) {
    throw_bad_request(
        fmt::format("Model configuration: {} is {}, more than the largest possible {}.", field,
                    value, kLargestExtent));
  }
}

[[noreturn]] void refuse(const std::string& problem) {
  throw_bad_request("Model configuration: " + problem);
}

void require_not_negative(double value, const char* field) {
  if (!(value >= 0) || !std::isfinite(value)) {
    refuse(fmt::format("{} must not be negative, it is {}.", field, value));
  }
}

void require_probability(double value, const char* field) {
  if (!(value >= 0 && value < 1)) {
    refuse(fmt::format("{} must be at least 0 and below 1, it is {}.", field, value));
  }
}

void validate_router(const ModelConfig& config) {
  const bool softmax = config.moe_router_score_function == ScoreFunction::softmax;
  if (!(config.moe_router_topk_scaling_factor > 0) ||
      !std::isfinite(config.moe_router_topk_scaling_factor)) {
    refuse(fmt::format("moe_router_topk_scaling_factor must be positive, it is {}.",
                       config.moe_router_topk_scaling_factor));
  }
  const int32_t groups = config.moe_router_num_groups;
  const int32_t group_topk = config.moe_router_group_topk;
  if (groups < 0 || group_topk < 0 || (groups == 0) != (group_topk == 0)) {
    refuse("moe_router_num_groups and moe_router_group_topk go together, both positive.");
  }
  if (groups > 0) {
    if (config.num_experts % groups != 0) {
      refuse(fmt::format("num_experts ({}) must be a multiple of moe_router_num_groups ({}).",
                         config.num_experts, groups));
    }
    if (group_topk > groups) {
      refuse(fmt::format("moe_router_group_topk ({}) is larger than moe_router_num_groups ({}).",
                         group_topk, groups));
    }
    const int32_t of_group = config.num_experts / groups;
    if (config.moe_router_group_scores < 0 || config.moe_router_group_scores > of_group) {
      refuse(fmt::format("moe_router_group_scores ({}) must be at most the {} experts of a group.",
                         config.moe_router_group_scores, of_group));
    }
    const int64_t reachable = int64_t{group_topk} * (config.num_experts / groups);
    if (config.moe_router_topk > reachable || config.moe_router_topk < group_topk) {
      refuse(fmt::format(
          "moe_router_topk ({}) must be at least moe_router_group_topk ({}) and at most the {} "
          "experts of that many groups.",
          config.moe_router_topk, group_topk, reachable));
    }
  }
  if (groups == 0 && config.moe_router_group_scores != 0) {
    refuse("moe_router_group_scores needs moe_router_num_groups.");
  }
  if (config.moe_router_enable_expert_bias && softmax) {
    refuse("moe_router_enable_expert_bias needs the score function sigmoid or sqrtsoftplus.");
  }
  if (config.moe_router_sinkhorn) {
    if (!softmax || groups > 0 || config.moe_router_enable_expert_bias) {
      refuse("sinkhorn routing has no groups, no expert bias and no other score function.");
    }
    if (config.moe_aux_loss_coeff > 0 || config.moe_seq_aux_loss_coeff > 0 ||
        config.moe_global_aux_loss_coeff > 0) {
      refuse("sinkhorn routing balances by itself; auxiliary losses must be 0 with it.");
    }
    if (config.moe_expert_capacity_factor > 0) {
      refuse("sinkhorn routing does not go together with moe_expert_capacity_factor.");
    }
  }
  require_not_negative(config.moe_router_bias_update_rate, "moe_router_bias_update_rate");
  require_not_negative(config.moe_aux_loss_coeff, "moe_aux_loss_coeff");
  require_not_negative(config.moe_seq_aux_loss_coeff, "moe_seq_aux_loss_coeff");
  require_not_negative(config.moe_global_aux_loss_coeff, "moe_global_aux_loss_coeff");
  require_not_negative(config.moe_z_loss_coeff, "moe_z_loss_coeff");
  require_not_negative(config.moe_expert_capacity_factor, "moe_expert_capacity_factor");
  require_probability(config.moe_input_jitter_eps, "moe_input_jitter_eps");
  if (!std::isfinite(config.moe_router_force_biased)) {
    refuse("moe_router_force_biased must be finite.");
  }
  if (config.moe_pad_expert_input_to_capacity && config.moe_expert_capacity_factor == 0) {
    refuse("moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor.");
  }
  if (config.moe_expert_row_multiple < 1 || config.moe_expert_row_multiple > 4096) {
    refuse(fmt::format("moe_expert_row_multiple must be between 1 and 4096, it is {}.",
                       config.moe_expert_row_multiple));
  }
  if (config.moe_expert_row_multiple > 1 && config.moe_pad_expert_input_to_capacity) {
    refuse("rows are padded either to the capacity or to a multiple, not both.");
  }
}

void validate_rope(const ModelConfig& config) {
  if (!(config.rotary_base > 1)) refuse("rotary_base must be above 1.");
  if (!(config.rotary_percent > 0 && config.rotary_percent <= 1)) {
    refuse(fmt::format("rotary_percent must be above 0 and at most 1, it is {}.",
                       config.rotary_percent));
  }
  if (config.rotary_dim() < 2 || config.rotary_dim() % 2 != 0) {
    refuse(
        fmt::format("what turns of a head (RoPE) must be even and at least 2: it is {} of the "
                    "head size {}.",
                    config.rotary_dim(), config.kv_channels));
  }
  if (config.rotary_interleaved && !config.multi_latent_attention) {
    refuse("rotary_interleaved is made for multi_latent_attention only.");
  }
  if (!(config.rope_scaling_factor > 0) || !std::isfinite(config.rope_scaling_factor)) {
    refuse(
        fmt::format("rope_scaling_factor must be positive, it is {}.", config.rope_scaling_factor));
  }
  require_not_negative(config.rope_mscale, "rope_mscale");
  require_not_negative(config.rope_mscale_all_dim, "rope_mscale_all_dim");
  require_not_negative(config.rope_attention_factor, "rope_attention_factor");
  const RopeScalingKind kind = config.rope_scaling_type;
  if (kind != RopeScalingKind::llama3 && kind != RopeScalingKind::yarn) return;
  require_sensible(config.rope_original_positions, "rope_original_positions");
  const double slow = config.rope_scaling_slow;
  const double fast = config.rope_scaling_fast;
  const bool fits = kind == RopeScalingKind::yarn ? fast >= slow : fast > slow;
  if (!(slow > 0) || !fits || !std::isfinite(fast)) {
    refuse(fmt::format("rope_scaling_slow ({}) must be positive, and rope_scaling_fast ({}) {} it.",
                       slow, fast, kind == RopeScalingKind::yarn ? "at least" : "larger than"));
  }
}

void validate_latent_attention(const ModelConfig& config) {
  if (config.q_lora_rank != 0) require_sensible(config.q_lora_rank, "q_lora_rank");
  require_sensible(config.kv_lora_rank, "kv_lora_rank");
  require_sensible(config.qk_head_dim, "qk_head_dim");
  require_sensible(config.qk_pos_emb_head_dim, "qk_pos_emb_head_dim");
  require_sensible(config.v_head_dim, "v_head_dim");
  require_not_negative(config.latent_norm_epsilon, "latent_norm_epsilon");
  if (config.num_query_groups != config.num_attention_heads) {
    refuse(
        fmt::format("multi_latent_attention has no groups of queries: num_query_groups ({}) "
                    "must be num_attention_heads ({}).",
                    config.num_query_groups, config.num_attention_heads));
  }
  if (config.kv_channels != config.qk_head_dim + config.qk_pos_emb_head_dim) {
    refuse(
        fmt::format("kv_channels ({}) must be qk_head_dim ({}) and qk_pos_emb_head_dim ({}) "
                    "together.",
                    config.kv_channels, config.qk_head_dim, config.qk_pos_emb_head_dim));
  }
  if (config.rotary_percent != 1) {
    refuse("multi_latent_attention has no rotary_percent: qk_pos_emb_head_dim says what turns.");
  }
  const std::array<std::pair<bool, std::string_view>, 7> foreign = {{
      {config.qk_l2_norm, "qk_l2_norm"},
      {config.sliding_window != 0, "sliding_window"},
      {config.attention_sinks, "attention_sinks"},
      {config.zero_attention_sinks, "zero_attention_sinks"},
      {config.attention_output_gate, "attention_output_gate"},
      {config.add_qkv_bias, "add_qkv_bias"},
      {config.add_bias_linear, "biases (disable_bias_linear)"},
  }};
  for (const auto& [is_set, name] : foreign) {
    if (is_set) refuse(fmt::format("multi_latent_attention has no {}.", name));
  }
}

void validate_sparse_attention(const ModelConfig& config) {
  require_sensible(config.dsa_indexer_topk, "dsa_indexer_topk");
  require_sensible(config.dsa_indexer_n_heads, "dsa_indexer_n_heads");
  require_sensible(config.dsa_indexer_head_dim, "dsa_indexer_head_dim");
  require_not_negative(config.dsa_indexer_k_norm_epsilon, "dsa_indexer_k_norm_epsilon");
  require_not_negative(config.dsa_indexer_loss_coeff, "dsa_indexer_loss_coeff");
  if (!config.multi_latent_attention || config.q_lora_rank == 0) {
    refuse("sparse attention (dsa_indexer_topk) needs multi_latent_attention and q_lora_rank.");
  }
  if (config.dsa_indexer_head_dim < config.qk_pos_emb_head_dim) {
    refuse(fmt::format("dsa_indexer_head_dim ({}) must be at least qk_pos_emb_head_dim ({}).",
                       config.dsa_indexer_head_dim, config.qk_pos_emb_head_dim));
  }
  if (!config.linear_attention_layers.empty()) {
    refuse("sparse attention and linear_attention_layers do not go together.");
  }
  if (config.attention_dropout > 0) refuse("sparse attention has no attention_dropout.");
  if (int64_t{config.dsa_indexer_n_heads} * config.dsa_indexer_head_dim > kLargestExtent) {
    refuse("dsa_indexer_n_heads and dsa_indexer_head_dim make a projection that is too large.");
  }
}

void validate_linear_attention(const ModelConfig& config) {
  TROUPE_CHECK(config.linear_attention_layers.size() == static_cast<size_t>(config.num_layers),
               "linear_attention_layers by layer");
  require_sensible(config.linear_conv_kernel_dim, "linear_conv_kernel_dim");
  require_sensible(config.linear_num_key_heads, "linear_num_key_heads");
  require_sensible(config.linear_num_value_heads, "linear_num_value_heads");
  require_sensible(config.linear_key_head_dim, "linear_key_head_dim");
  require_sensible(config.linear_value_head_dim, "linear_value_head_dim");
  if (config.linear_conv_kernel_dim > kMostTaps) {
    refuse(fmt::format("linear_conv_kernel_dim ({}) must be at most {}.",
                       config.linear_conv_kernel_dim, kMostTaps));
  }
  if (config.linear_num_value_heads % config.linear_num_key_heads != 0) {
    refuse(
        fmt::format("linear_num_value_heads ({}) must be a multiple of linear_num_key_heads "
                    "({}).",
                    config.linear_num_value_heads, config.linear_num_key_heads));
  }
}

// The sizes on which everything else depends.
void validate_sizes(const ModelConfig& config) {
  require_sensible(config.vocab_size, "vocab_size");
  if (config.padding_token < -1 || config.padding_token >= config.vocab_size) {
    refuse(fmt::format("padding_token ({}) must be -1, for none, or below vocab_size ({}).",
                       config.padding_token, config.vocab_size));
  }
  require_sensible(config.hidden_size, "hidden_size");
  require_sensible(config.num_layers, "num_layers");
  require_sensible(config.num_attention_heads, "num_attention_heads");
  require_sensible(config.num_query_groups, "num_query_groups");
  require_sensible(config.kv_channels, "kv_channels");
  require_sensible(config.max_position_embeddings, "max_position_embeddings");
  // One operation reads the gradients of all layers, and has at most 65,535 operands.
  if (config.num_layers > 2000) {
    throw_bad_request(
        fmt::format("Model configuration: num_layers is {}, more than 2000.", config.num_layers));
  }
  if (config.mtp_num_layers < 0 || config.mtp_num_layers > 100) {
    refuse(
        fmt::format("mtp_num_layers must be between 0 and 100, it is {}.", config.mtp_num_layers));
  }
  require_not_negative(config.mtp_loss_scaling_factor, "mtp_loss_scaling_factor");
}

void validate_attention(const ModelConfig& config) {
  if (config.num_attention_heads % config.num_query_groups != 0) {
    throw_bad_request(
        fmt::format("Model configuration: num_attention_heads ({}) must be a multiple of "
                    "num_query_groups ({}).",
                    config.num_attention_heads, config.num_query_groups));
  }
  if (config.multi_latent_attention) validate_latent_attention(config);
  if (config.has_sparse_attention()) validate_sparse_attention(config);
  if (!config.linear_attention_layers.empty()) validate_linear_attention(config);
  if (config.attention_output_gate && config.add_qkv_bias) {
    refuse("attention_output_gate has no biases of queries, keys and values.");
  }
  validate_rope(config);
  const int64_t projection =
      (int64_t{config.num_attention_heads} + 2 * int64_t{config.num_query_groups}) *
      config.kv_channels;
  if (projection > kLargestExtent) {
    throw_bad_request(fmt::format(
        "Model configuration: num_attention_heads ({}) and num_query_groups ({}) of "
        "kv_channels ({}) make a projection of {} rows, more than the largest possible {}.",
        config.num_attention_heads, config.num_query_groups, config.kv_channels, projection,
        kLargestExtent));
  }
  if (config.attention_sinks && config.zero_attention_sinks) {
    refuse("attention_sinks are learned, or zero (zero_attention_sinks): not both.");
  }
  if (config.qk_l2_norm && config.qk_layernorm) {
    refuse("qk_l2_norm and qk_layernorm are two kinds of one norm: choose one.");
  }
  if (config.sliding_window < 0) {
    throw_bad_request("Model configuration: sliding_window must not be negative.");
  }
  TROUPE_CHECK(config.window_layers.empty() ||
                   config.window_layers.size() == static_cast<size_t>(config.num_layers),
               "window_layers by layer");
  if (!config.window_layers.empty() && config.sliding_window == 0)
    refuse("window_layers needs sliding_window.");
}

void validate_experts(const ModelConfig& config) {
  if (config.num_experts < 0) {
    throw_bad_request(fmt::format(
        "Model configuration: num_experts must not be negative, it is {}.", config.num_experts));
  }
  if (config.num_experts > 0) {
    require_sensible(config.num_experts, "num_experts");
    require_sensible(config.moe_router_topk, "moe_router_topk");
    require_sensible(config.moe_ffn_hidden_size, "moe_ffn_hidden_size");
    if (config.moe_router_topk > config.num_experts) {
      throw_bad_request(
          fmt::format("Model configuration: moe_router_topk ({}) is larger than num_experts ({}).",
                      config.moe_router_topk, config.num_experts));
    }
    if (config.moe_shared_expert_intermediate_size != 0) {
      require_sensible(config.moe_shared_expert_intermediate_size,
                       "moe_shared_expert_intermediate_size");
    } else if (config.moe_shared_expert_gate) {
      refuse("moe_shared_expert_gate needs moe_shared_expert_intermediate_size.");
    }
    validate_router(config);
    TROUPE_CHECK(config.moe_layers.size() == static_cast<size_t>(config.num_layers),
                 "moe_layers by layer");
  }
}

void validate_others(const ModelConfig& config) {
  require_not_negative(config.init_method_std, "init_method_std");
  if (!std::isfinite(config.embedding_init_method_std)) {
    refuse("embedding_init_method_std must be finite.");
  }
  if (config.init_method_xavier_uniform && config.add_bias_linear && config.num_experts > 0) {
    refuse(
        "init_method_xavier_uniform has no rule for the bias of a router (Megatron's fails there, "
        "too): leave out the biases (add_bias_linear).");
  }
  if (!(config.norm_epsilon > 0)) refuse("norm_epsilon must be positive.");
  require_probability(config.hidden_dropout, "hidden_dropout");
  require_probability(config.attention_dropout, "attention_dropout");
  require_not_negative(config.activation_clamp, "activation_clamp");
  if (!config.gated_linear_unit &&
      (config.activation_clamp != 0 || config.glu_linear_offset != 0)) {
    refuse("activation_clamp and glu_linear_offset belong to gated linear units.");
  }
  if (config.moe_layer_count() < config.num_layers)
    require_sensible(config.ffn_hidden_size, "ffn_hidden_size");
}

constexpr std::array kIndependentParts = {validate_attention, validate_experts, validate_others};

}  // namespace

std::string_view name_of(Normalization normalization) {
  switch (normalization) {
    case Normalization::rms_norm:
      return "RMSNorm";
    case Normalization::layer_norm:
      return "LayerNorm";
  }
  return "?";
}

int32_t ModelConfig::moe_layer_count() const {
  if (num_experts == 0) return 0;
  return static_cast<int32_t>(std::count(moe_layers.begin(), moe_layers.end(), true));
}

int32_t ModelConfig::rotary_dim() const {
  if (multi_latent_attention) return qk_pos_emb_head_dim;
  return static_cast<int32_t>(kv_channels * rotary_percent);
}

RopeScaling ModelConfig::rope_scaling() const {
  RopeScaling scaling{.kind = rope_scaling_type,
                      .round_range = rope_round_range,
                      .original_positions = rope_original_positions,
                      .factor = rope_scaling_factor,
                      .fast = rope_scaling_fast,
                      .slow = rope_scaling_slow};
  if (rope_scaling_type != RopeScalingKind::yarn) return scaling;
  const double factor = rope_scaling_factor;
  if (rope_attention_factor > 0) {
    scaling.concentration = rope_attention_factor;
  } else if (rope_mscale > 0 && rope_mscale_all_dim > 0) {
    scaling.concentration =
        length_factor(factor, rope_mscale) / length_factor(factor, rope_mscale_all_dim);
  } else {
    scaling.concentration = length_factor(factor, 1);
  }
  return scaling;
}

double ModelConfig::rope_score_factor() const {
  if (!multi_latent_attention || rope_scaling_type == RopeScalingKind::none) return 1;
  const double factor = length_factor(rope_scaling_factor, rope_mscale_all_dim);
  return factor * factor;
}

void ModelConfig::validate() const {
  validate_sizes(*this);
  for (const auto validate_part : kIndependentParts) validate_part(*this);
}

std::vector<std::string> problems_of(const ModelConfig& config) {
  std::vector<std::string> found;
  const auto is_sound = [&](auto validate_part) {
    try {
      validate_part(config);
      return true;
    } catch (const UserError& error) {
      found.emplace_back(error.what());
      return false;
    }
  };
  if (!is_sound(validate_sizes)) return found;
  for (const auto validate_part : kIndependentParts) is_sound(validate_part);
  return found;
}

void ModelConfig::require_learning_router() const {
  const bool is_normalised =
      moe_router_score_function == ScoreFunction::softmax && !moe_router_pre_softmax;
  if (num_experts > 0 && moe_router_topk == 1 && is_normalised && !moe_router_sinkhorn) {
    refuse(
        "top-1 routing with softmax needs moe_router_pre_softmax, or every router weight would "
        "be 1 and the router could not learn.");
  }
}

}  // namespace troupe
