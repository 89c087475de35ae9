#include "io/hf_families.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "model/window_layers.h"

namespace troupe {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// What scales the angles of positions, under rope_parameters or rope_scaling.
void read_rope_scaling(const HfFields& rope, ModelConfig& config) {
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  RopeScalingKind& kind = config.rope_scaling_type;
  if (type == "default") return;
  if (type == "linear") {
    kind = RopeScalingKind::linear;
  } else if (type == "llama3") {
    kind = RopeScalingKind::llama3;
    config.rope_scaling_fast = rope.required_number("high_freq_factor");
    config.rope_scaling_slow = rope.required_number("low_freq_factor");
  } else if (type == "yarn") {
    kind = RopeScalingKind::yarn;
    config.rope_scaling_fast = rope.number("beta_fast", 32);
    config.rope_scaling_slow = rope.number("beta_slow", 1);
    config.rope_round_range = rope.boolean("truncate", true);
    config.rope_mscale = rope.number("mscale", 0);
    config.rope_mscale_all_dim = rope.number("mscale_all_dim", 0);
    config.rope_attention_factor = rope.number("attention_factor", 0);
  } else {
    rope.add_unsupported(fmt::format(
        "RoPE of type {} is not supported, only \"default\", \"linear\", \"llama3\" and \"yarn\".",
        quote_name(type)));
    return;
  }
  config.rope_scaling_factor = rope.required_number("factor");
  if (kind == RopeScalingKind::linear) return;
  config.rope_original_positions =
      rope.integer({"original_max_position_embeddings"}, config.max_position_embeddings);
}

void read_rope(const HfFields& fields, const HfFamily& family, ModelConfig& config) {
  config.rotary_base = fields.number("rope_theta", family.rope_theta);
  const bool is_partial = family.partial_rotary_factor != 0;
  double part =
      fields.number("partial_rotary_factor", is_partial ? family.partial_rotary_factor : 1);
  if (const json* rope = fields.find({"rope_parameters", "rope_scaling"})) {
    if (!rope->is_object()) fields.refuse("\"rope_parameters\" must be an object.");
    const HfFields inner = fields.within(*rope);
    read_rope_scaling(inner, config);
    config.rotary_base = inner.number("rope_theta", config.rotary_base);
    part = inner.number("partial_rotary_factor", part);
  }
  if (is_partial) {
    config.rotary_percent = part;
  } else if (part != 1) {
    fields.add_unsupported("\"partial_rotary_factor\" other than 1 is not supported.");
  }
}

// What every architecture computes alike, as far as Troupe does.
void read_computation(const HfFields& fields, const HfFamily& family, ModelConfig& config) {
  read_rope(fields, family, config);
  const std::string activation = fields.text("hidden_act", "silu");
  if (activation != "silu") {
    fields.add_unsupported(
        fmt::format("\"hidden_act\": {} is not supported, only \"silu\".", quote_name(activation)));
  }
  fields.expect_false("mlp_bias");
  fields.expect_number("attention_dropout", 0);
}

// The embedding's padding_idx, in all of the architectures. Like there, a negative one counts from
// the end of the vocabulary, and OLMoE has one unless the file says null.
void read_padding_token(const HfFields& fields, ModelConfig& config) {
  const json* field = fields.find("pad_token_id");
  if (field == nullptr) {
    const bool olmoe = config.hf_architecture == "OlmoeForCausalLM";
    config.padding_token = olmoe && !fields.mentions("pad_token_id") ? 1 : -1;
    return;
  }
  const int32_t token = fields.to_integer(*field, "pad_token_id");
  if (token >= config.vocab_size || -int64_t{token} > config.vocab_size) {
    return fields.add_contradiction(
        fmt::format("\"pad_token_id\" ({}) lies outside the vocabulary of {} tokens.", token,
                    config.vocab_size));
  }
  config.padding_token = token < 0 ? token + config.vocab_size : token;
}

void read_common(const HfFields& fields, const HfFamily& family, ModelConfig& config) {
  config.vocab_size = fields.required_integer({"vocab_size"});
  read_padding_token(fields, config);
  config.hidden_size = fields.required_integer({"hidden_size"});
  config.num_layers = fields.required_integer({"num_hidden_layers"});
  config.num_attention_heads = fields.required_integer({"num_attention_heads"});
  const int32_t groups = family.num_key_value_heads;
  config.num_query_groups = fields.integer(
      {"num_key_value_heads"},
      groups == 0 || fields.mentions("num_key_value_heads") ? config.num_attention_heads : groups);
  config.max_position_embeddings = fields.required_integer({"max_position_embeddings"});
  config.norm_epsilon = fields.number("rms_norm_eps", family.rms_norm_eps);
  config.tie_embeddings = fields.boolean("tie_word_embeddings", false);
  config.init_method_std = fields.number("initializer_range", 0.02);
  if (config.num_attention_heads <= 0) fields.refuse("\"num_attention_heads\" must be positive.");
  read_computation(fields, family, config);
}

// Of attention that is not latent.
void read_head_size(const HfFields& fields, ModelConfig& config) {
  if (fields.find("head_dim") == nullptr && config.hidden_size % config.num_attention_heads != 0) {
    fields.refuse(fmt::format(
        "\"hidden_size\" ({}) is not a multiple of \"num_attention_heads\" ({}), and there is no "
        "\"head_dim\".",
        config.hidden_size, config.num_attention_heads));
  }
  config.kv_channels =
      fields.integer({"head_dim"}, config.hidden_size / config.num_attention_heads);
}

void read_experts(const HfFields& fields, ModelConfig& config) {
  config.num_experts =
      fields.required_integer({"num_local_experts", "num_experts", "n_routed_experts"});
  config.moe_router_topk = fields.required_integer({"num_experts_per_tok"});
  config.moe_aux_loss_coeff = fields.number("router_aux_loss_coef", 0.0);
  if (config.num_experts < 1) fields.refuse("\"num_local_experts\" must be positive.");
  if (config.num_layers < 1 || config.num_layers > 10000) {
    fields.refuse(fmt::format("\"num_hidden_layers\" is {}, it must be between 1 and 10000.",
                              config.num_layers));
  }
  config.moe_layers.assign(static_cast<size_t>(config.num_layers), true);
}

void read_plain_attention(const HfFields& fields, ModelConfig& config) {
  read_head_size(fields, config);
  fields.expect_false("attention_bias");
}

void read_mixtral(const HfFields& fields, ModelConfig& config) {
  read_plain_attention(fields, config);
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"intermediate_size"});
  config.sliding_window = fields.integer({"sliding_window"}, 0);
  fields.expect_number("router_jitter_noise", 0);
}

// Which layers have experts, and what the Qwen architectures have in common.
void read_qwen_moe(const HfFields& fields, ModelConfig& config) {
  read_plain_attention(fields, config);
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"moe_intermediate_size"});
  config.moe_router_pre_softmax = !fields.boolean("norm_topk_prob", false);
  const int32_t step = fields.integer({"decoder_sparse_step"}, 1);
  if (step < 1) fields.refuse("\"decoder_sparse_step\" must be positive.");
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    config.moe_layers[static_cast<size_t>(layer)] = (layer + 1) % step == 0;
  }
  if (const json* dense = fields.find("mlp_only_layers")) {
    if (!dense->is_array()) fields.refuse("\"mlp_only_layers\" must be a list of layer numbers.");
    for (const json& entry : *dense) {
      const int32_t layer = fields.to_integer(entry, "mlp_only_layers");
      if (layer < 0 || layer >= config.num_layers) {
        fields.refuse(
            fmt::format("\"mlp_only_layers\" names layer {}, which does not exist.", layer));
      }
      config.moe_layers[static_cast<size_t>(layer)] = false;
    }
  }
  if (config.moe_layer_count() < config.num_layers) {
    config.ffn_hidden_size = fields.required_integer({"intermediate_size"});
  }
}

// Where a window begins at a layer of its own, Troupe does not compute it.
void expect_no_window(const HfFields& fields) {
  fields.expect_false("use_sliding_window");
  const json* types = fields.find("layer_types");
  if (types == nullptr) return;
  if (!types->is_array()) fields.refuse("\"layer_types\" must be a list.");
  for (const json& type : *types) {
    if (type == "full_attention") continue;
    return fields.add_unsupported(
        "\"layer_types\" other than \"full_attention\" are not supported.");
  }
}

void read_qwen2_moe(const HfFields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config);
  config.add_qkv_bias = fields.boolean("qkv_bias", true);
  config.moe_shared_expert_intermediate_size =
      fields.required_integer({"shared_expert_intermediate_size"});
  config.moe_shared_expert_gate = true;
  expect_no_window(fields);
}

void read_qwen3_moe(const HfFields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config);
  config.qk_layernorm = true;
  if (fields.boolean("use_sliding_window", false)) {
    config.sliding_window = fields.integer({"sliding_window"}, 0);
  }
}

void read_olmoe(const HfFields& fields, ModelConfig& config) {
  read_plain_attention(fields, config);
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"intermediate_size"});
  config.moe_router_pre_softmax = !fields.boolean("norm_topk_prob", false);
  config.qk_layernorm = true;
  config.qk_norm_scope = QkNormScope::projection;
  if (fields.find("clip_qkv") != nullptr) fields.add_unsupported("\"clip_qkv\" is not supported.");
}

void read_llama(const HfFields& fields, ModelConfig& config) {
  read_plain_attention(fields, config);
  config.ffn_hidden_size = fields.required_integer({"intermediate_size"});
}

void write_qwen_moe(const ModelConfig& config, ordered_json& document) {
  document["moe_intermediate_size"] = config.moe_ffn_hidden_size;
  document["norm_topk_prob"] = !config.moe_router_pre_softmax;
  document["decoder_sparse_step"] = 1;
  document["mlp_only_layers"] = json::array();
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe_layer(layer)) document["mlp_only_layers"].push_back(layer);
  }
  document["intermediate_size"] =
      config.ffn_hidden_size > 0 ? config.ffn_hidden_size : config.moe_ffn_hidden_size;
}

void read_qwen3(const HfFields& fields, ModelConfig& config) {
  config.qk_layernorm = true;
  read_llama(fields, config);
  expect_no_window(fields);
}

// Dense layers first, then experts, and shared ones, as the DeepSeek architectures have them.
// `dense_layers` and `shared_experts`: what a missing field means.
void read_deepseek_experts(const HfFields& fields, int32_t dense_layers, int32_t shared_experts,
                           ModelConfig& config) {
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"moe_intermediate_size"});
  const int32_t dense = fields.integer({"first_k_dense_replace"}, dense_layers);
  const int32_t step = fields.integer({"moe_layer_freq"}, 1);
  if (dense < 0) fields.refuse("\"first_k_dense_replace\" must not be negative.");
  if (step < 1) fields.refuse("\"moe_layer_freq\" must be positive.");
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    config.moe_layers[static_cast<size_t>(layer)] = layer >= dense && layer % step == 0;
  }
  if (config.moe_layer_count() < config.num_layers) {
    config.ffn_hidden_size = fields.required_integer({"intermediate_size"});
  }
  const int32_t shared = fields.integer({"n_shared_experts", "num_shared_experts"}, shared_experts);
  const int64_t size = int64_t{shared} * config.moe_ffn_hidden_size;
  if (shared < 0 || size > std::numeric_limits<int32_t>::max()) {
    fields.refuse("\"n_shared_experts\" must not be negative, nor too large.");
  }
  config.moe_shared_expert_intermediate_size = static_cast<int32_t>(size);
  config.moe_router_topk_scaling_factor = fields.number("routed_scaling_factor", 1);
  const double balancing = fields.number("aux_loss_alpha", 0);
  (fields.boolean("seq_aux", true) ? config.moe_seq_aux_loss_coeff : config.moe_aux_loss_coeff) =
      balancing;
}

// The router of DeepSeek-V3: sigmoid scores, a bias that balances, groups whose score is that of
// their two best experts.
void read_biased_router(const HfFields& fields, int32_t groups, int32_t group_topk,
                        ModelConfig& config) {
  config.moe_router_score_function = ScoreFunction::sigmoid;
  config.moe_router_enable_expert_bias = true;
  const bool normalize = fields.boolean("norm_topk_prob", true);
  // The score of a single expert is its weight in Troupe, always.
  config.moe_router_normalize_scores = normalize || config.moe_router_topk == 1;
  if (normalize && config.moe_router_topk == 1) {
    fields.add_unsupported(
        "\"norm_topk_prob\": true with \"num_experts_per_tok\": 1 is not supported: every weight "
        "would be 1, and the router could not learn.");
  }
  if (fields.text("scoring_func", "sigmoid") != "sigmoid") {
    fields.add_unsupported("\"scoring_func\" other than \"sigmoid\" is not supported here.");
  }
  if (fields.text("topk_method", "noaux_tc") != "noaux_tc") {
    fields.add_unsupported("\"topk_method\" other than \"noaux_tc\" is not supported here.");
  }
  config.moe_router_num_groups = fields.integer({"n_group"}, groups);
  config.moe_router_group_topk = fields.integer({"topk_group"}, group_topk);
  config.moe_router_group_scores = 2;
  if (config.moe_router_num_groups <= 1) {
    config.moe_router_num_groups = config.moe_router_group_topk = 0;
    config.moe_router_group_scores = 0;
  }
}

// transformers norms the latents with this epsilon, whatever the file says.
constexpr double kLatentNormEpsilon = 1e-6;

constexpr int32_t kQueryRank = 1536;  // where the file says nothing

void read_latent_attention(const HfFields& fields, ModelConfig& config) {
  fields.expect_false("attention_bias");
  config.multi_latent_attention = true;
  config.qk_layernorm = true;
  config.q_lora_rank =
      fields.mentions("q_lora_rank") ? fields.integer({"q_lora_rank"}, 0) : kQueryRank;
  config.kv_lora_rank = fields.integer({"kv_lora_rank"}, 512);
  config.qk_head_dim = fields.integer({"qk_nope_head_dim"}, 128);
  config.qk_pos_emb_head_dim = fields.integer({"qk_rope_head_dim"}, 64);
  config.v_head_dim = fields.integer({"v_head_dim"}, 128);
  constexpr int32_t kMost = 1 << 24;
  if (config.qk_head_dim > kMost || config.qk_pos_emb_head_dim > kMost) {
    fields.refuse(
        fmt::format("\"qk_nope_head_dim\" and \"qk_rope_head_dim\" are at most {}.", kMost));
  }
  config.kv_channels = config.qk_head_dim + config.qk_pos_emb_head_dim;
  config.rotary_interleaved = fields.boolean("rope_interleave", true);
  if (config.norm_epsilon != kLatentNormEpsilon) config.latent_norm_epsilon = kLatentNormEpsilon;
}

void read_deepseek_v2(const HfFields& fields, ModelConfig& config) {
  read_latent_attention(fields, config);
  read_deepseek_experts(fields, 0, 2, config);
  config.moe_router_pre_softmax = true;
  fields.expect_false("norm_topk_prob");
  if (fields.text("scoring_func", "softmax") != "softmax") {
    fields.add_unsupported("\"scoring_func\" other than \"softmax\" is not supported here.");
  }
  const std::string method = fields.text("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    config.moe_router_num_groups = fields.required_integer({"n_group"});
    config.moe_router_group_topk = fields.required_integer({"topk_group"});
    config.moe_router_group_scores = 1;
  } else if (method != "greedy") {
    fields.add_unsupported(
        fmt::format("\"topk_method\": {} is not supported.", quote_name(method)));
  }
}

void read_deepseek_v3(const HfFields& fields, ModelConfig& config) {
  read_latent_attention(fields, config);
  read_deepseek_experts(fields, 3, 1, config);
  if (!fields.mentions("routed_scaling_factor")) config.moe_router_topk_scaling_factor = 2.5;
  read_biased_router(fields, 8, 4, config);
}

// Which layers have experts, where the file says it by layer.
void read_mlp_layer_types(const HfFields& fields, ModelConfig& config) {
  const json* types = fields.find("mlp_layer_types");
  if (types == nullptr) return;
  if (!types->is_array() || types->size() != static_cast<size_t>(config.num_layers)) {
    fields.refuse("\"mlp_layer_types\" must be a list with an entry for each layer.");
  }
  const auto is_known = [](const json& type) { return type == "dense" || type == "sparse"; };
  if (!std::all_of(types->begin(), types->end(), is_known)) {
    return fields.add_unsupported(
        "\"mlp_layer_types\" other than \"dense\" and \"sparse\" are not supported.");
  }
  for (size_t layer = 0; layer < types->size(); ++layer) {
    config.moe_layers[layer] = (*types)[layer] == "sparse";
  }
  if (config.moe_layer_count() < config.num_layers && config.ffn_hidden_size == 0) {
    config.ffn_hidden_size = fields.required_integer({"intermediate_size"});
  }
}

// transformers norms the indexer's keys with this epsilon, whatever the file says.
constexpr double kIndexNormEpsilon = 1e-6;

void read_deepseek_v32(const HfFields& fields, ModelConfig& config) {
  read_deepseek_v3(fields, config);
  read_mlp_layer_types(fields, config);
  if (config.q_lora_rank == 0) {
    fields.add_unsupported("\"q_lora_rank\": null is not supported here.");
    config.q_lora_rank = kQueryRank;
  }
  const json* types = fields.find("layer_types");
  const auto is_sparse = [](const json& type) { return type == "deepseek_sparse_attention"; };
  if (types != nullptr &&
      !(types->is_array() && std::all_of(types->begin(), types->end(), is_sparse))) {
    fields.add_unsupported(
        "\"layer_types\" other than \"deepseek_sparse_attention\" are not supported.");
  }
  config.dsa_indexer_topk = fields.integer({"index_topk"}, 2048);
  config.dsa_indexer_n_heads = fields.integer({"index_n_heads"}, 64);
  config.dsa_indexer_head_dim = fields.integer({"index_head_dim"}, 128);
  if (config.dsa_indexer_topk < 1) fields.refuse("\"index_topk\" must be positive.");
  if (config.norm_epsilon != kIndexNormEpsilon) {
    config.dsa_indexer_k_norm_epsilon = kIndexNormEpsilon;
  }
}

void read_glm4_moe(const HfFields& fields, ModelConfig& config) {
  read_head_size(fields, config);
  config.add_qkv_bias = fields.boolean("attention_bias", false);
  config.qk_layernorm = fields.boolean("use_qk_norm", false);
  read_deepseek_experts(fields, 1, 1, config);
  read_biased_router(fields, 1, 1, config);
}

// How much of each head turns, where the file gives its elements rather than the part.
void read_rotary_elements(const HfFields& fields, ModelConfig& config) {
  const json* elements = fields.find("rotary_dim");
  if (elements == nullptr) return;
  const int32_t turning = fields.to_integer(*elements, "rotary_dim");
  const json* rope = fields.find({"rope_parameters", "rope_scaling"});
  const bool has_part = fields.find("partial_rotary_factor") != nullptr ||
                        (rope != nullptr && rope->contains("partial_rotary_factor"));
  if (!has_part) {
    config.rotary_percent = static_cast<double>(turning) / std::max(1, config.kv_channels);
  } else if (config.rotary_dim() != turning) {
    fields.refuse(
        fmt::format("\"rotary_dim\" ({}) and \"partial_rotary_factor\", which makes {} "
                    "elements of a head turn, contradict each other.",
                    turning, config.rotary_dim()));
  }
}

void read_minimax_m2(const HfFields& fields, ModelConfig& config) {
  config.kv_channels = fields.integer({"head_dim"}, 128);
  fields.expect_false("attention_bias");
  read_rotary_elements(fields, config);
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"intermediate_size"});
  config.qk_layernorm = true;
  config.qk_norm_scope = QkNormScope::projection;
  read_biased_router(fields, 1, 1, config);
  for (const char* name : {"use_qk_norm", "use_routing_bias"}) {
    if (!fields.boolean(name, true)) {
      fields.add_unsupported(fmt::format("\"{}\": false is not supported here.", name));
    }
  }
  if (fields.text("qk_norm_type", "per_layer") != "per_layer") {
    fields.add_unsupported("\"qk_norm_type\" other than \"per_layer\" is not supported here.");
  }
  fields.expect_number("shared_intermediate_size", 0);
  fields.expect_number("router_jitter_noise", 0);
  for (const char* name : {"layernorm_full_attention_beta", "layernorm_mlp_beta"}) {
    fields.expect_number(name, 1);
  }
  const json* types = fields.find("attn_type_list");
  const auto is_attention = [](const json& type) { return type == 1; };
  if (types != nullptr &&
      !(types->is_array() && std::all_of(types->begin(), types->end(), is_attention))) {
    fields.add_unsupported("\"attn_type_list\" with other entries than 1 is not supported.");
  }
}

void write_minimax_m2(const ModelConfig& config, ordered_json& document) {
  document["intermediate_size"] = config.moe_ffn_hidden_size;
  document["qk_norm_type"] = "per_layer";
  document["rotary_dim"] = config.rotary_dim();
  document["router_jitter_noise"] = 0.0;
  document["scoring_func"] = "sigmoid";
  document["shared_intermediate_size"] = 0;
  document["use_qk_norm"] = true;
  document["use_routing_bias"] = true;
}

// The code that its makers publish takes for granted what is expected here.
void read_ling2(const HfFields& fields, ModelConfig& config) {
  if (fields.mentions("head_dim")) {
    read_head_size(fields, config);
  } else {
    config.kv_channels = 128;
  }
  config.add_qkv_bias = fields.boolean("use_qkv_bias", false);
  config.qk_layernorm = fields.boolean("use_qk_norm", true);
  read_deepseek_experts(fields, 1, fields.mentions("num_shared_experts") ? 0 : 1, config);
  read_biased_router(fields, 8, 4, config);
  for (const char* name : {"norm_topk_prob", "moe_router_enable_expert_bias"}) {
    if (!fields.boolean(name, true)) {
      fields.add_unsupported(fmt::format("\"{}\": false is not supported here.", name));
    }
  }
  if (fields.text("score_function", "sigmoid") != "sigmoid") {
    fields.add_unsupported("\"score_function\" other than \"sigmoid\" is not supported here.");
  }
  fields.expect_false("use_bias");
  fields.expect_number("embedding_dropout", 0);
  fields.expect_number("output_dropout", 0);
}

// Which layers have attention; without the field every fourth one does.
void read_linear_attention(const HfFields& fields, ModelConfig& config) {
  const json* types = fields.find("layer_types");
  if (types != nullptr &&
      (!types->is_array() || types->size() != static_cast<size_t>(config.num_layers))) {
    fields.refuse("\"layer_types\" must be a list with an entry for each layer.");
  }
  const int32_t interval = fields.integer({"full_attention_interval"}, 4);
  if (interval < 1) fields.refuse("\"full_attention_interval\" must be positive.");
  std::vector<bool>& layers = config.linear_attention_layers;
  for (int32_t i = 0; i < config.num_layers; ++i) {
    const json type = types == nullptr ? json(i % interval == interval - 1 ? "full_attention"
                                                                           : "linear_attention")
                                       : (*types)[static_cast<size_t>(i)];
    layers.push_back(type == "linear_attention");
    if (type == "linear_attention" || type == "full_attention") continue;
    layers.clear();
    return fields.add_unsupported(
        "\"layer_types\" other than \"linear_attention\" and \"full_attention\" are not "
        "supported.");
  }
  if (std::find(layers.begin(), layers.end(), true) == layers.end()) return layers.clear();
  config.linear_conv_kernel_dim = fields.integer({"linear_conv_kernel_dim"}, 4);
  config.linear_num_key_heads = fields.integer({"linear_num_key_heads"}, 16);
  config.linear_num_value_heads = fields.integer({"linear_num_value_heads"}, 32);
  config.linear_key_head_dim = fields.integer({"linear_key_head_dim"}, 128);
  config.linear_value_head_dim = fields.integer({"linear_value_head_dim"}, 128);
}

// What Qwen3-Next and Qwen3.5 have in common.
void read_delta_net_model(const HfFields& fields, ModelConfig& config) {
  config.kv_channels = fields.integer({"head_dim"}, 256);
  config.moe_shared_expert_intermediate_size =
      fields.integer({"shared_expert_intermediate_size"}, 512);
  config.moe_shared_expert_gate = true;
  config.qk_layernorm = true;
  config.zero_centered_gamma = true;
  config.attention_output_gate = true;
  read_linear_attention(fields, config);
}

void read_qwen3_next(const HfFields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config);
  config.moe_router_pre_softmax = !fields.boolean("norm_topk_prob", true);
  read_delta_net_model(fields, config);
}

// Experts in all layers, whose weights add up to 1. Positions in text are the same in all three
// sections of rope_parameters ("mrope_section"), so these have no effect.
void read_qwen3_5_moe(const HfFields& fields, ModelConfig& config) {
  fields.expect_false("attention_bias");
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"moe_intermediate_size"});
  read_delta_net_model(fields, config);
}

void write_delta_net_model(const ModelConfig& config, ordered_json& document) {
  document["shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size;
  document["layer_types"] = json::array();
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    document["layer_types"].push_back(config.has_linear_attention(layer) ? "linear_attention"
                                                                         : "full_attention");
  }
  if (config.linear_attention_layers.empty()) return;
  document["linear_conv_kernel_dim"] = config.linear_conv_kernel_dim;
  document["linear_num_key_heads"] = config.linear_num_key_heads;
  document["linear_num_value_heads"] = config.linear_num_value_heads;
  document["linear_key_head_dim"] = config.linear_key_head_dim;
  document["linear_value_head_dim"] = config.linear_value_head_dim;
}

void write_qwen3_next(const ModelConfig& config, ordered_json& document) {
  write_qwen_moe(config, document);
  write_delta_net_model(config, document);
}

void write_qwen3_5_moe(const ModelConfig& config, ordered_json& document) {
  document["moe_intermediate_size"] = config.moe_ffn_hidden_size;
  document["mtp_num_hidden_layers"] = config.own_mtp_layers();
  write_delta_net_model(config, document);
}

// Layers with the window and layers without; without the field they alternate.
void read_layer_types(const HfFields& fields, ModelConfig& config) {
  config.sliding_window = fields.integer({"sliding_window"}, 128);
  std::vector<bool> windows;
  const json* types = fields.find("layer_types");
  if (types == nullptr) {
    for (int32_t i = 0; i < config.num_layers; ++i) windows.push_back(i % 2 == 0);
  } else {
    if (!types->is_array() || types->size() != static_cast<size_t>(config.num_layers)) {
      fields.refuse("\"layer_types\" must be a list with an entry for each layer.");
    }
    for (const json& type : *types) {
      windows.push_back(type == "sliding_attention");
      if (type == "sliding_attention" || type == "full_attention") continue;
      return fields.add_unsupported(
          "\"layer_types\" other than \"sliding_attention\" and \"full_attention\" are not "
          "supported.");
    }
  }
  set_window_layers(std::move(windows), config);
}

void read_gpt_oss(const HfFields& fields, ModelConfig& config) {
  read_head_size(fields, config);
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"intermediate_size"});
  if (!fields.boolean("attention_bias", true)) {
    fields.add_unsupported("\"attention_bias\": false is not supported here.");
  }
  config.add_qkv_bias = true;
  config.add_bias_linear = true;
  config.attention_sinks = true;
  read_layer_types(fields, config);
  config.activation = ActivationFunction::quick_gelu;
  fields.expect_number("swiglu_alpha", 1.702);
  config.activation_clamp = fields.number("swiglu_limit", 7);
  config.glu_linear_offset = 1;
}

void write_gpt_oss(const ModelConfig& config, ordered_json& document) {
  document["attention_bias"] = true;
  document["intermediate_size"] = config.moe_ffn_hidden_size;
  document["layer_types"] = json::array();
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const bool has_window = config.sliding_window > 0 && config.has_window(layer);
    document["layer_types"].push_back(has_window ? "sliding_attention" : "full_attention");
  }
  document["sliding_window"] = config.sliding_window > 0 ? json(config.sliding_window) : json();
  document["swiglu_alpha"] = 1.702;
  document["swiglu_limit"] = config.activation_clamp;
}

void write_mixtral(const ModelConfig& config, ordered_json& document) {
  document["intermediate_size"] = config.moe_ffn_hidden_size;
  document["sliding_window"] = config.sliding_window > 0 ? json(config.sliding_window) : json();
  document["router_jitter_noise"] = 0.0;
}

void write_olmoe(const ModelConfig& config, ordered_json& document) {
  document["intermediate_size"] = config.moe_ffn_hidden_size;
  document["norm_topk_prob"] = !config.moe_router_pre_softmax;
  document["clip_qkv"] = nullptr;
}

void write_qwen2_moe(const ModelConfig& config, ordered_json& document) {
  write_qwen_moe(config, document);
  document["qkv_bias"] = config.add_qkv_bias;
  document["shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size;
  document["use_sliding_window"] = false;
}

void write_qwen3_moe(const ModelConfig& config, ordered_json& document) {
  write_qwen_moe(config, document);
  document["use_sliding_window"] = config.sliding_window > 0;
  document["sliding_window"] = config.sliding_window > 0 ? json(config.sliding_window) : json();
}

void write_dense(const ModelConfig& config, ordered_json& document) {
  document["intermediate_size"] = config.ffn_hidden_size;
}

void write_deepseek_experts(const ModelConfig& config, ordered_json& document) {
  const auto first_moe = std::find(config.moe_layers.begin(), config.moe_layers.end(), true);
  document["first_k_dense_replace"] = first_moe - config.moe_layers.begin();
  document["intermediate_size"] =
      config.ffn_hidden_size > 0 ? config.ffn_hidden_size : config.moe_ffn_hidden_size;
  document["moe_intermediate_size"] = config.moe_ffn_hidden_size;
  document["moe_layer_freq"] = 1;
  document["n_routed_experts"] = config.num_experts;
  document["n_shared_experts"] =
      config.moe_ffn_hidden_size > 0
          ? config.moe_shared_expert_intermediate_size / config.moe_ffn_hidden_size
          : 0;
  document["routed_scaling_factor"] = config.moe_router_topk_scaling_factor;
  document["num_nextn_predict_layers"] = config.own_mtp_layers();
}

void write_biased_router(const ModelConfig& config, ordered_json& document) {
  document["n_group"] = std::max(1, config.moe_router_num_groups);
  document["topk_group"] = std::max(1, config.moe_router_group_topk);
  document["topk_method"] = "noaux_tc";
  document["scoring_func"] = "sigmoid";
  document["norm_topk_prob"] = config.moe_router_normalize_scores && config.moe_router_topk > 1;
}

void write_latent_attention(const ModelConfig& config, ordered_json& document) {
  document["head_dim"] = config.qk_pos_emb_head_dim;
  document["kv_lora_rank"] = config.kv_lora_rank;
  document["q_lora_rank"] = config.q_lora_rank > 0 ? json(config.q_lora_rank) : json();
  document["qk_head_dim"] = config.qk_head_dim + config.qk_pos_emb_head_dim;
  document["qk_nope_head_dim"] = config.qk_head_dim;
  document["qk_rope_head_dim"] = config.qk_pos_emb_head_dim;
  document["v_head_dim"] = config.v_head_dim;
}

void write_deepseek_v2(const ModelConfig& config, ordered_json& document) {
  write_latent_attention(config, document);
  write_deepseek_experts(config, document);
  const bool has_groups = config.moe_router_num_groups > 0;
  document["n_group"] = has_groups ? json(config.moe_router_num_groups) : json();
  document["topk_group"] = has_groups ? json(config.moe_router_group_topk) : json();
  document["topk_method"] = has_groups ? "group_limited_greedy" : "greedy";
  document["scoring_func"] = "softmax";
  document["norm_topk_prob"] = false;
}

void write_deepseek_v3(const ModelConfig& config, ordered_json& document) {
  write_latent_attention(config, document);
  document["rope_interleave"] = config.rotary_interleaved;
  write_deepseek_experts(config, document);
  write_biased_router(config, document);
}

void write_deepseek_v32(const ModelConfig& config, ordered_json& document) {
  write_deepseek_v3(config, document);
  document["mlp_layer_types"] = json::array();
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    document["mlp_layer_types"].push_back(config.is_moe_layer(layer) ? "sparse" : "dense");
  }
  // Without an indexer its fields are left out, and are read as another model's: it has no such
  // form.
  if (!config.has_sparse_attention()) return;
  document["index_topk"] = config.dsa_indexer_topk;
  document["index_n_heads"] = config.dsa_indexer_n_heads;
  document["index_head_dim"] = config.dsa_indexer_head_dim;
}

void write_glm4_moe(const ModelConfig& config, ordered_json& document) {
  document["attention_bias"] = config.add_qkv_bias;
  document["use_qk_norm"] = config.qk_layernorm;
  write_deepseek_experts(config, document);
  write_biased_router(config, document);
}

void write_ling2(const ModelConfig& config, ordered_json& document) {
  write_deepseek_experts(config, document);
  write_biased_router(config, document);
  document["num_shared_experts"] = document["n_shared_experts"];
  document["moe_router_enable_expert_bias"] = true;
  document["score_function"] = "sigmoid";
  document["use_bias"] = false;
  document["use_qk_norm"] = config.qk_layernorm;
  document["use_qkv_bias"] = config.add_qkv_bias;
}

constexpr HfFamily kFamilies[] = {
    {"MixtralForCausalLM", "mixtral", true, 1e6, 1e-5, 8, 0, read_mixtral, write_mixtral},
    {"Qwen3MoeForCausalLM", "qwen3_moe", true, 1e4, 1e-6, 4, 0, read_qwen3_moe, write_qwen3_moe},
    {"Qwen2MoeForCausalLM", "qwen2_moe", true, 1e4, 1e-6, 16, 0, read_qwen2_moe, write_qwen2_moe},
    {"OlmoeForCausalLM", "olmoe", true, 1e4, 1e-5, 0, 0, read_olmoe, write_olmoe},
    {"DeepseekV3ForCausalLM", "deepseek_v3", true, 1e4, 1e-6, 128, 0, read_deepseek_v3,
     write_deepseek_v3, HfMtpNames::as_layers},
    {kDeepseekV32Architecture, "deepseek_v32", true, 1e4, 1e-6, 128, 0, read_deepseek_v32,
     write_deepseek_v32},
    {"DeepseekV2ForCausalLM", "deepseek_v2", true, 1e4, 1e-6, 0, 0, read_deepseek_v2,
     write_deepseek_v2},
    {"Glm4MoeForCausalLM", "glm4_moe", true, 1e4, 1e-5, 8, 0.5, read_glm4_moe, write_glm4_moe,
     HfMtpNames::as_layers},
    {"GptOssForCausalLM", "gpt_oss", true, 150000, 1e-5, 8, 0, read_gpt_oss, write_gpt_oss},
    {kQwen3NextArchitecture, "qwen3_next", true, 1e4, 1e-6, 2, 0.25, read_qwen3_next,
     write_qwen3_next, HfMtpNames::apart},
    {kQwen35MoeArchitecture, "qwen3_5_moe_text", true, 1e4, 1e-6, 2, 0.25, read_qwen3_5_moe,
     write_qwen3_5_moe, HfMtpNames::apart},
    {kMiniMaxM2Architecture, "minimax_m2", true, 5e6, 1e-6, 8, 1, read_minimax_m2,
     write_minimax_m2},
    {kLing2Architecture, "bailing_moe", true, 6e5, 1e-6, 4, 1, read_ling2, write_ling2},
    {"LlamaForCausalLM", "llama", false, 1e4, 1e-6, 0, 0, read_llama, write_dense},
    {"Qwen3ForCausalLM", "qwen3", false, 1e4, 1e-6, 32, 0, read_qwen3, write_dense},
};

// Known ones that Troupe does not compute: what it lacks, and the supported one that comes nearest.
struct ForeignArchitecture {
  std::string_view name;
  std::string_view missing;
  std::string_view nearest;
};
constexpr ForeignArchitecture kForeignArchitectures[] = {
    {"Qwen2ForCausalLM", "dense layers with biases of queries, keys and values",
     "LlamaForCausalLM"},
    {"MistralForCausalLM", "its name only: without a sliding window it is the same model",
     "LlamaForCausalLM"},
    {"PhimoeForCausalLM", "routing by SparseMixer, and norms with biases", "MixtralForCausalLM"},
    {"DbrxForCausalLM", "norms that subtract the mean, and clipped queries, keys and values",
     "MixtralForCausalLM"},
    {"GraniteMoeForCausalLM", "multipliers of embeddings, attention, residuals and logits",
     "MixtralForCausalLM"},
    {"JambaForCausalLM", "Mamba layers", "MixtralForCausalLM"},
    {"Llama4ForCausalLM", "attention in chunks, and router weights on what experts read",
     "MixtralForCausalLM"},
    {"Llama4ForConditionalGeneration", "images, and attention in chunks", "MixtralForCausalLM"},
    {"Qwen3VLMoeForConditionalGeneration", "images, and positions of three dimensions",
     "Qwen3MoeForCausalLM"},
    {"GlmMoeDsaForCausalLM",
     "indexers whose queries and keys turn in pairs of neighbours, and choices that layers share",
     kDeepseekV32Architecture},
    {"DeepseekV4ForCausalLM",
     "attention to compressed keys, hyper-connections, and experts chosen by the token's id",
     kDeepseekV32Architecture},
};

// The scaling of angles in the dialect of transformers 5; empty where there is none.
ordered_json render_rope_scaling(const ModelConfig& config) {
  ordered_json rope = ordered_json::object();
  const RopeScalingKind kind = config.rope_scaling_type;
  if (kind == RopeScalingKind::none) return rope;
  rope["rope_type"] = name_of(kind);
  rope["factor"] = config.rope_scaling_factor;
  if (kind == RopeScalingKind::linear) return rope;
  rope["original_max_position_embeddings"] = config.rope_original_positions;
  if (kind == RopeScalingKind::llama3) {
    rope["high_freq_factor"] = config.rope_scaling_fast;
    rope["low_freq_factor"] = config.rope_scaling_slow;
    return rope;
  }
  rope["beta_fast"] = config.rope_scaling_fast;
  rope["beta_slow"] = config.rope_scaling_slow;
  rope["truncate"] = config.rope_round_range;
  const auto add = [&](const char* name, double value) {
    if (value > 0) rope[name] = value;
  };
  add("mscale", config.rope_mscale);
  add("mscale_all_dim", config.rope_mscale_all_dim);
  add("attention_factor", config.rope_attention_factor);
  return rope;
}

// Under both names, and with the older name of the kind.
void write_rope(const HfFamily& family, const ModelConfig& config, ordered_json& document) {
  const ordered_json scaling = render_rope_scaling(config);
  ordered_json parameters = scaling;
  parameters["rope_type"] = name_of(config.rope_scaling_type);
  parameters["rope_theta"] = config.rotary_base;
  if (family.partial_rotary_factor != 0) {
    parameters["partial_rotary_factor"] = config.rotary_percent;
    document["partial_rotary_factor"] = config.rotary_percent;
  }
  document["rope_parameters"] = parameters;
  document["rope_scaling"] = nullptr;
  if (!scaling.empty()) {
    document["rope_scaling"] = scaling;
    document["rope_scaling"]["type"] = scaling["rope_type"];
  }
  document["rope_theta"] = config.rotary_base;
}

}  // namespace

std::span<const HfFamily> hf_families() {
  return kFamilies;
}

const HfFamily* find_hf_family(std::string_view architecture) {
  for (const HfFamily& family : kFamilies) {
    if (family.architecture == architecture) return &family;
  }
  return nullptr;
}

void read_hf_family(const HfFamily& family, const HfFields& fields, ModelConfig& config) {
  config.hf_architecture = family.architecture;
  read_common(fields, family, config);
  family.read(fields, config);
}

void refuse_hf_architecture(const HfFields& fields, std::string_view architecture) {
  std::string problem =
      fmt::format("the architecture {} is not supported", quote_name(std::string(architecture)));
  for (const ForeignArchitecture& known : kForeignArchitectures) {
    if (known.name != architecture) continue;
    problem += fmt::format(" (missing: {}; {} comes nearest)", known.missing, known.nearest);
  }
  std::vector<std::string_view> supported;
  for (const HfFamily& family : kFamilies) supported.push_back(family.architecture);
  problem += fmt::format(". Supported: {}.", fmt::join(supported, ", "));
  fields.add_unsupported(std::move(problem));
  ModelConfig unused;
  read_computation(fields, kFamilies[0], unused);
  fields.expect_false("attention_bias");
  fields.refuse_collected();
}

ordered_json render_hf_config(const HfFamily& family, const ModelConfig& config) {
  ordered_json document = {
      {"architectures", {config.hf_architecture}},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"head_dim", config.kv_channels},
      {"hidden_act", "silu"},
      {"hidden_size", config.hidden_size},
      {"initializer_range", config.init_method_std},
      {"max_position_embeddings", config.max_position_embeddings},
      {"model_type", family.model_type},
      {"num_attention_heads", config.num_attention_heads},
      {"num_hidden_layers", config.num_layers},
      {"num_key_value_heads", config.num_query_groups},
      {"pad_token_id", config.padding_token >= 0 ? json(config.padding_token) : json()},
      {"rms_norm_eps", config.norm_epsilon},
      {"tie_word_embeddings", config.tie_embeddings},
      {"use_cache", true},
      {"vocab_size", config.vocab_size},
  };
  write_rope(family, config, document);
  if (config.num_experts > 0) {
    document["num_local_experts"] = config.num_experts;
    document["num_experts"] = config.num_experts;
    document["num_experts_per_tok"] = config.moe_router_topk;
    document["output_router_logits"] = false;
    document["router_aux_loss_coef"] = config.moe_aux_loss_coeff;
  }
  family.write(config, document);
  return document;
}

}  // namespace troupe
