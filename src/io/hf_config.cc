#include "io/hf_config.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "io/file.h"
#include "io/json.h"
#include "io/model_config_json.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr int kMaxConfigDepth = 16;

// In the order in which a name is looked for that fits a shape.
constexpr const char* kArchitectures[] = {"MixtralForCausalLM",  "Qwen3MoeForCausalLM",
                                          "Qwen2MoeForCausalLM", "OlmoeForCausalLM",
                                          "LlamaForCausalLM",    "Qwen3ForCausalLM"};
bool is_dense(std::string_view architecture) {
  return architecture == "LlamaForCausalLM" || architecture == "Qwen3ForCausalLM";
}

constexpr uint64_t kMaxConfigBytes = 1 << 20;

// One configuration file, read field by field. Absent and null fields are the same.
class Fields {
 public:
  Fields(const json& object, const std::string& where) : object_(object), where_(where) {}

  [[noreturn]] void refuse(const std::string& problem) const {
    throw_bad_request(fmt::format("{}: {}", where_, problem));
  }

  const json* find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  // Is it there, be it as null?
  bool mentions(const char* name) const { return object_.contains(name); }
  // The first of several names of the same thing that is present.
  const json* find(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (const json* value = find(name)) return value;
    }
    return nullptr;
  }

  int32_t integer(std::initializer_list<const char*> names, int32_t otherwise) const {
    const json* value = find(names);
    return value == nullptr ? otherwise : to_integer(*value, *names.begin());
  }
  int32_t required_integer(std::initializer_list<const char*> names) const {
    const json* value = find(names);
    if (value == nullptr) refuse(fmt::format("the field \"{}\" is missing.", *names.begin()));
    return to_integer(*value, *names.begin());
  }
  double number(const char* name, double otherwise) const {
    const json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_number()) refuse(fmt::format("the field \"{}\" must be a number.", name));
    return value->get<double>();
  }
  bool boolean(const char* name, bool otherwise) const {
    const json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse(fmt::format("the field \"{}\" must be true or false.", name));
    return value->get<bool>();
  }
  std::string text(const char* name, const std::string& otherwise) const {
    const json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) refuse(fmt::format("the field \"{}\" must be a string.", name));
    return value->get<std::string>();
  }
  // Refuses a field that is present with another value than the one Troupe computes.
  void expect_false(const char* name) const {
    if (boolean(name, false)) refuse(fmt::format("\"{}\": true is not supported.", name));
  }

  int32_t to_integer(const json& value, const char* name) const {
    if (!value.is_number_integer() || value.get<double>() > 2147483647.0 ||
        value.get<double>() < -2147483648.0) {
      refuse(fmt::format("the field \"{}\" must be an integer of at most 2147483647.", name));
    }
    return value.get<int32_t>();
  }

 private:
  const json& object_;
  const std::string& where_;
};

void read_rope(const Fields& fields, const std::string& where, ModelConfig& config) {
  config.rotary_base = fields.number("rope_theta", 10000.0);
  const json* rope = fields.find({"rope_parameters", "rope_scaling"});
  if (rope == nullptr) return;
  if (!rope->is_object()) fields.refuse("\"rope_parameters\" must be an object.");
  const Fields inner(*rope, where);
  const std::string type = inner.text("rope_type", inner.text("type", "default"));
  if (type != "default") {
    fields.refuse(
        fmt::format("RoPE of type {} is not supported, only \"default\".", quote_name(type)));
  }
  config.rotary_base = inner.number("rope_theta", config.rotary_base);
  if (inner.number("partial_rotary_factor", 1.0) != 1.0) {
    fields.refuse("\"partial_rotary_factor\" other than 1 is not supported.");
  }
}

// The embedding's padding_idx, in all of the architectures. Like there, a negative one counts from
// the end of the vocabulary, and OLMoE has one unless the file says null.
void read_padding_token(const Fields& fields, ModelConfig& config) {
  const json* field = fields.find("pad_token_id");
  if (field == nullptr) {
    const bool olmoe = config.hf_architecture == "OlmoeForCausalLM";
    config.padding_token = olmoe && !fields.mentions("pad_token_id") ? 1 : -1;
    return;
  }
  const int32_t token = fields.to_integer(*field, "pad_token_id");
  if (token >= config.vocab_size || -int64_t{token} > config.vocab_size) {
    fields.refuse(fmt::format("\"pad_token_id\" ({}) lies outside the vocabulary of {} tokens.",
                              token, config.vocab_size));
  }
  config.padding_token = token < 0 ? token + config.vocab_size : token;
}

void read_common(const Fields& fields, const std::string& where, ModelConfig& config) {
  config.vocab_size = fields.required_integer({"vocab_size"});
  read_padding_token(fields, config);
  config.hidden_size = fields.required_integer({"hidden_size"});
  config.num_layers = fields.required_integer({"num_hidden_layers"});
  config.num_attention_heads = fields.required_integer({"num_attention_heads"});
  config.num_query_groups = fields.integer({"num_key_value_heads"}, config.num_attention_heads);
  config.max_position_embeddings = fields.required_integer({"max_position_embeddings"});
  config.norm_epsilon = fields.number("rms_norm_eps", 1e-6);
  config.tie_embeddings = fields.boolean("tie_word_embeddings", false);
  config.init_method_std = fields.number("initializer_range", 0.02);
  if (config.num_attention_heads <= 0) fields.refuse("\"num_attention_heads\" must be positive.");
  if (fields.find("head_dim") == nullptr && config.hidden_size % config.num_attention_heads != 0) {
    fields.refuse(fmt::format(
        "\"hidden_size\" ({}) is not a multiple of \"num_attention_heads\" ({}), and there is no "
        "\"head_dim\".",
        config.hidden_size, config.num_attention_heads));
  }
  config.kv_channels =
      fields.integer({"head_dim"}, config.hidden_size / config.num_attention_heads);
  read_rope(fields, where, config);

  const std::string activation = fields.text("hidden_act", "silu");
  if (activation != "silu") {
    fields.refuse(
        fmt::format("\"hidden_act\": {} is not supported, only \"silu\".", quote_name(activation)));
  }
  fields.expect_false("attention_bias");
  fields.expect_false("mlp_bias");
  if (fields.number("attention_dropout", 0.0) != 0.0) {
    fields.refuse("\"attention_dropout\" other than 0 is not supported.");
  }
}

void read_experts(const Fields& fields, ModelConfig& config) {
  config.num_experts = fields.required_integer({"num_local_experts", "num_experts"});
  config.moe_router_topk = fields.required_integer({"num_experts_per_tok"});
  config.moe_aux_loss_coeff = fields.number("router_aux_loss_coef", 0.0);
  if (config.num_experts < 1) fields.refuse("\"num_local_experts\" must be positive.");
  if (config.num_layers < 1 || config.num_layers > 10000) {
    fields.refuse(fmt::format("\"num_hidden_layers\" is {}, it must be between 1 and 10000.",
                              config.num_layers));
  }
  config.moe_layers.assign(static_cast<size_t>(config.num_layers), true);
}

void read_mixtral(const Fields& fields, ModelConfig& config) {
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"intermediate_size"});
  config.sliding_window = fields.integer({"sliding_window"}, 0);
  if (fields.number("router_jitter_noise", 0.0) != 0.0) {
    fields.refuse("\"router_jitter_noise\" other than 0 is not supported.");
  }
}

// Which layers have experts, and what the Qwen architectures have in common.
void read_qwen_moe(const Fields& fields, ModelConfig& config) {
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

void read_qwen2_moe(const Fields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config);
  config.add_qkv_bias = fields.boolean("qkv_bias", true);
  config.moe_shared_expert_intermediate_size =
      fields.required_integer({"shared_expert_intermediate_size"});
  config.moe_shared_expert_gate = true;
  // There the window begins at a layer of its own, which Troupe does not compute.
  fields.expect_false("use_sliding_window");
}

void read_qwen3_moe(const Fields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config);
  config.qk_layernorm = true;
  if (fields.boolean("use_sliding_window", false)) {
    config.sliding_window = fields.integer({"sliding_window"}, 0);
  }
}

void read_olmoe(const Fields& fields, ModelConfig& config) {
  read_experts(fields, config);
  config.moe_ffn_hidden_size = fields.required_integer({"intermediate_size"});
  config.moe_router_pre_softmax = !fields.boolean("norm_topk_prob", false);
  config.qk_layernorm = true;
  config.qk_norm_scope = QkNormScope::projection;
  if (fields.find("clip_qkv") != nullptr) fields.refuse("\"clip_qkv\" is not supported.");
}

void read_dense(const Fields& fields, ModelConfig& config) {
  config.ffn_hidden_size = fields.required_integer({"intermediate_size"});
}

// A message about a ModelConfig in the words of config.json.
std::string in_hf_terms(std::string message) {
  // An earlier replacement must not be touched by a later one.
  constexpr std::pair<std::string_view, std::string_view> kTerms[] = {
      {"num_experts", "num_local_experts"},
      {"moe_router_topk", "num_experts_per_tok"},
      {"num_layers", "num_hidden_layers"},
      {"num_query_groups", "num_key_value_heads"},
      {"kv_channels", "head_dim"},
      {"ffn_hidden_size", "intermediate_size"},
      {"norm_epsilon", "rms_norm_eps"},
      {"rotary_base", "rope_theta"},
      {"init_method_std", "initializer_range"},
      {"padding_token", "pad_token_id"},
      {"moe_aux_loss_coeff", "router_aux_loss_coef"}};
  for (const auto& [ours, theirs] : kTerms) {
    for (size_t at = message.find(ours); at != std::string::npos;
         at = message.find(ours, at + theirs.size())) {
      message.replace(at, ours.size(), theirs);
    }
  }
  return message;
}

// The configuration without what has no effect on the weights or on what a trained model computes.
ModelConfig without_idle_fields(ModelConfig config) {
  const ModelConfig unset;
  config.hidden_dropout = 0;
  config.attention_dropout = 0;
  config.moe_seq_aux_loss_coeff = 0;
  config.moe_global_aux_loss_coeff = 0;
  config.moe_z_loss_coeff = 0;
  config.moe_input_jitter_eps = 0;
  config.moe_router_force_load_balancing = false;
  config.moe_router_fp64 = false;
  config.moe_expert_capacity_factor = 0;
  config.moe_token_drop_policy = unset.moe_token_drop_policy;
  config.moe_pad_expert_input_to_capacity = false;
  config.moe_expert_row_multiple = 1;
  if (!config.moe_router_enable_expert_bias) {
    config.moe_router_bias_update_rate = unset.moe_router_bias_update_rate;
  }
  if (config.num_experts == 0) {
    config.moe_router_topk = 0;
    config.moe_ffn_hidden_size = 0;
    config.moe_shared_expert_intermediate_size = 0;
    config.moe_shared_expert_gate = false;
    config.moe_router_score_function = unset.moe_router_score_function;
    config.moe_router_pre_softmax = false;
    config.moe_router_topk_scaling_factor = unset.moe_router_topk_scaling_factor;
    config.moe_router_num_groups = 0;
    config.moe_router_group_topk = 0;
    config.moe_router_sinkhorn = false;
    config.moe_router_enable_expert_bias = false;
    config.moe_router_bias_update_rate = unset.moe_router_bias_update_rate;
    config.moe_layers.clear();
    config.moe_aux_loss_coeff = 0;
  } else if (config.moe_layer_count() == config.num_layers) {
    config.ffn_hidden_size = 0;
  }
  return config;
}

void write_qwen_moe(const ModelConfig& config, json& document) {
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

// Reads the fields; whether they fit together is not checked.
ModelConfig parse_fields(std::string_view json_text, const std::string& where) {
  const json document = parse_json(json_text, where, kMaxConfigDepth);
  if (!document.is_object()) throw_bad_request(where + ": a model configuration is a JSON object.");
  const Fields fields(document, where);

  ModelConfig config;
  const json* architectures = fields.find("architectures");
  if (architectures == nullptr || !architectures->is_array() || architectures->size() != 1 ||
      !(*architectures)[0].is_string()) {
    fields.refuse("\"architectures\" must be a list with the name of one architecture.");
  }
  config.hf_architecture = (*architectures)[0].get<std::string>();
  read_common(fields, where, config);
  if (config.hf_architecture == "MixtralForCausalLM") {
    read_mixtral(fields, config);
  } else if (config.hf_architecture == "Qwen2MoeForCausalLM") {
    read_qwen2_moe(fields, config);
  } else if (config.hf_architecture == "Qwen3MoeForCausalLM") {
    read_qwen3_moe(fields, config);
  } else if (config.hf_architecture == "OlmoeForCausalLM") {
    read_olmoe(fields, config);
  } else if (config.hf_architecture == "LlamaForCausalLM") {
    read_dense(fields, config);
  } else if (config.hf_architecture == "Qwen3ForCausalLM") {
    config.qk_layernorm = true;
    read_dense(fields, config);
    fields.expect_false("use_sliding_window");
  } else {
    fields.refuse(fmt::format("the architecture {} is not supported. Supported: {}.",
                              quote_name(config.hf_architecture), fmt::join(kArchitectures, ", ")));
  }
  return config;
}

}  // namespace

ModelConfig parse_hf_config(std::string_view json_text, const std::string& where) {
  ModelConfig config = parse_fields(json_text, where);
  try {
    config.validate();
  } catch (const UserError& error) {
    throw UserError(error.status(), where + ": " + in_hf_terms(error.what()));
  }
  return config;
}

ModelConfig read_hf_config(const std::string& path) {
  return parse_hf_config(read_file(path, kMaxConfigBytes), path);
}

namespace {

// The text, whether or not it says all of the configuration.
std::string render(const ModelConfig& config) {
  json document = {
      {"architectures", {config.hf_architecture}},
      {"attention_dropout", 0.0},
      {"head_dim", config.kv_channels},
      {"hidden_act", "silu"},
      {"hidden_size", config.hidden_size},
      {"initializer_range", config.init_method_std},
      {"max_position_embeddings", config.max_position_embeddings},
      {"num_attention_heads", config.num_attention_heads},
      {"num_hidden_layers", config.num_layers},
      {"num_key_value_heads", config.num_query_groups},
      {"pad_token_id", config.padding_token >= 0 ? json(config.padding_token) : json()},
      {"rms_norm_eps", config.norm_epsilon},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", config.rotary_base}}},
      {"tie_word_embeddings", config.tie_embeddings},
      {"vocab_size", config.vocab_size},
  };
  if (config.num_experts > 0) {
    document["num_local_experts"] = config.num_experts;
    document["num_experts_per_tok"] = config.moe_router_topk;
    document["router_aux_loss_coef"] = config.moe_aux_loss_coeff;
  }
  if (config.hf_architecture == "MixtralForCausalLM") {
    document["model_type"] = "mixtral";
    document["intermediate_size"] = config.moe_ffn_hidden_size;
    document["sliding_window"] = config.sliding_window > 0 ? json(config.sliding_window) : json();
  } else if (config.hf_architecture == "OlmoeForCausalLM") {
    document["model_type"] = "olmoe";
    document["intermediate_size"] = config.moe_ffn_hidden_size;
    document["norm_topk_prob"] = !config.moe_router_pre_softmax;
    document["clip_qkv"] = json();
  } else if (config.hf_architecture == "Qwen2MoeForCausalLM") {
    document["model_type"] = "qwen2_moe";
    write_qwen_moe(config, document);
    document["qkv_bias"] = config.add_qkv_bias;
    document["shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size;
    document["use_sliding_window"] = false;
  } else if (config.hf_architecture == "Qwen3MoeForCausalLM") {
    document["model_type"] = "qwen3_moe";
    write_qwen_moe(config, document);
    document["use_sliding_window"] = config.sliding_window > 0;
    document["sliding_window"] = config.sliding_window > 0 ? json(config.sliding_window) : json();
  } else {
    document["model_type"] = config.qk_layernorm ? "qwen3" : "llama";
    document["intermediate_size"] = config.ffn_hidden_size;
  }
  return document.dump(2) + "\n";
}

// What a config.json of the configuration's architecture cannot say of it, as "field = value".
std::vector<std::string> lost_fields(const ModelConfig& config) {
  if (is_dense(config.hf_architecture) != (config.num_experts == 0)) {
    return {fmt::format("num_experts = {}", config.num_experts)};
  }
  const ModelConfig read = parse_fields(render(config), "config.json");
  const json wanted = json::parse(write_model_config(without_idle_fields(config)));
  const json found = json::parse(write_model_config(without_idle_fields(read)));
  std::vector<std::string> lost;
  for (const auto& [name, value] : wanted.items()) {
    if (found.at(name) != value) lost.push_back(fmt::format("{} = {}", name, value.dump()));
  }
  return lost;
}

// With the name of that architecture, among those with experts or those without, which says most of
// the configuration.
ModelConfig with_nearest_architecture(ModelConfig config) {
  size_t fewest = std::numeric_limits<size_t>::max();
  std::string nearest;
  for (const char* name : kArchitectures) {
    if (is_dense(name) != (config.num_experts == 0)) continue;
    config.hf_architecture = name;
    const size_t lost = lost_fields(config).size();
    if (lost >= fewest) continue;
    fewest = lost;
    nearest = name;
  }
  config.hf_architecture = nearest;
  return config;
}

}  // namespace

std::string write_hf_config(const ModelConfig& config) {
  const bool named = !config.hf_architecture.empty();
  const ModelConfig written = named ? config : with_nearest_architecture(config);
  const std::vector<std::string> lost = lost_fields(written);
  if (!named || !lost.empty()) {
    throw_bad_request(fmt::format(
        "A config.json of {}{} cannot express {}, so this model has no Hugging Face form that "
        "Troupe could write.",
        written.hf_architecture,
        named ? "" : ", the nearest of the architectures that Troupe knows,",
        fmt::join(lost, ", ")));
  }
  return render(written);
}

std::string fitting_hf_architecture(const ModelConfig& config) {
  ModelConfig named = config;
  const auto fits = [&](const std::string& name) {
    named.hf_architecture = name;
    return lost_fields(named).empty();
  };
  if (!config.hf_architecture.empty() && fits(config.hf_architecture)) {
    return config.hf_architecture;
  }
  for (const char* name : kArchitectures) {
    if (fits(name)) return name;
  }
  return "";
}

}  // namespace troupe
