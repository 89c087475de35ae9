#include "model/model_config.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "base/error.h"

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

int64_t attention_parameters(const ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  const int64_t projections = hidden * config.qkv_size() + hidden * config.attention_size();
  return projections + (config.qk_layernorm ? 2 * config.kv_channels : 0);
}

// `experts`: how many experts of a MoE layer to count.
int64_t layer_parameters(const ModelConfig& config, int32_t layer, int64_t experts) {
  const int64_t hidden = config.hidden_size;
  int64_t count = attention_parameters(config) + 2 * hidden;
  if (config.is_moe_layer(layer)) {
    count += hidden * config.num_experts + experts * 3 * hidden * config.moe_ffn_hidden_size;
  } else {
    count += 3 * hidden * config.ffn_hidden_size;
  }
  return count;
}

int64_t count_parameters(const ModelConfig& config, int64_t experts) {
  const int64_t embedding = static_cast<int64_t>(config.vocab_size) * config.hidden_size;
  int64_t count = embedding * (config.tie_embeddings ? 1 : 2) + config.hidden_size;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    count += layer_parameters(config, layer, experts);
  }
  return count;
}

}  // namespace

int32_t ModelConfig::moe_layer_count() const {
  if (num_experts == 0) return 0;
  return static_cast<int32_t>(std::count(moe_layers.begin(), moe_layers.end(), true));
}

void ModelConfig::validate() const {
  require_sensible(vocab_size, "vocab_size");
  require_sensible(hidden_size, "hidden_size");
  require_sensible(num_layers, "num_layers");
  require_sensible(num_attention_heads, "num_attention_heads");
  require_sensible(num_query_groups, "num_query_groups");
  require_sensible(kv_channels, "kv_channels");
  require_sensible(max_position_embeddings, "max_position_embeddings");
  if (num_layers > 10000) {
    throw_bad_request(
        fmt::format("Model configuration: num_layers is {}, more than 10000.", num_layers));
  }
  if (num_attention_heads % num_query_groups != 0) {
    throw_bad_request(
        fmt::format("Model configuration: num_attention_heads ({}) must be a multiple of "
                    "num_query_groups ({}).",
                    num_attention_heads, num_query_groups));
  }
  if (kv_channels % 2 != 0) {
    throw_bad_request(fmt::format(
        "Model configuration: the head size must be even for RoPE, it is {}.", kv_channels));
  }
  const int64_t projection =
      (int64_t{num_attention_heads} + 2 * int64_t{num_query_groups}) * kv_channels;
  if (projection > kLargestExtent) {
    throw_bad_request(fmt::format(
        "Model configuration: num_attention_heads ({}) and num_query_groups ({}) of "
        "kv_channels ({}) make a projection of {} rows, more than the largest possible {}.",
        num_attention_heads, num_query_groups, kv_channels, projection, kLargestExtent));
  }
  const auto require_not_negative = [](double value, const char* field) {
    if (!(value >= 0) || !std::isfinite(value)) {
      throw_bad_request(
          fmt::format("Model configuration: {} must not be negative, it is {}.", field, value));
    }
  };
  require_not_negative(moe_aux_loss_coeff, "moe_aux_loss_coeff");
  require_not_negative(moe_z_loss_coeff, "moe_z_loss_coeff");
  require_not_negative(init_method_std, "init_method_std");
  if (!(norm_epsilon > 0) || !(rotary_base > 1)) {
    throw_bad_request(
        "Model configuration: norm_epsilon must be positive and rotary_base above 1.");
  }
  if (sliding_window < 0) {
    throw_bad_request("Model configuration: sliding_window must not be negative.");
  }
  if (num_experts < 0) {
    throw_bad_request(fmt::format(
        "Model configuration: num_experts must not be negative, it is {}.", num_experts));
  }
  if (num_experts > 0) {
    require_sensible(num_experts, "num_experts");
    require_sensible(moe_router_topk, "moe_router_topk");
    require_sensible(moe_ffn_hidden_size, "moe_ffn_hidden_size");
    if (moe_router_topk > num_experts) {
      throw_bad_request(
          fmt::format("Model configuration: moe_router_topk ({}) is larger than num_experts ({}).",
                      moe_router_topk, num_experts));
    }
    if (moe_router_topk == 1 && !moe_router_pre_softmax) {
      throw_bad_request(
          "Model configuration: top-1 routing needs moe_router_pre_softmax, or every router weight "
          "would be 1 and the router could not learn.");
    }
    TROUPE_CHECK(moe_layers.size() == static_cast<size_t>(num_layers), "moe_layers by layer");
  }
  if (moe_layer_count() < num_layers) require_sensible(ffn_hidden_size, "ffn_hidden_size");
}

int64_t ModelConfig::parameter_count() const {
  return count_parameters(*this, num_experts);
}

int64_t ModelConfig::active_parameter_count() const {
  return count_parameters(*this, moe_router_topk);
}

double ModelConfig::training_flops_per_sequence(int64_t sequence) const {
  const auto tokens = static_cast<double>(sequence);
  const double hidden = hidden_size;
  double per_token = hidden * vocab_size;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    per_token += hidden * (qkv_size() + attention_size());
    per_token += is_moe_layer(layer) ? 3.0 * hidden * moe_ffn_hidden_size * moe_router_topk
                                     : 3.0 * hidden * ffn_hidden_size;
  }
  const double attention =
      tokens * tokens * num_layers * attention_size();  // causal half, two products
  return 6.0 * (tokens * per_token + attention);
}

}  // namespace troupe
