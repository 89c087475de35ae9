#include "io/hf_config.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
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

// Known ones that Troupe does not compute: what it lacks, and the supported one that comes nearest.
struct ForeignArchitecture {
  std::string_view name;
  std::string_view missing;
  std::string_view nearest;
};
constexpr ForeignArchitecture kForeignArchitectures[] = {
    {"DeepseekV2ForCausalLM", "multi-head latent attention", "Qwen2MoeForCausalLM"},
    {"DeepseekV3ForCausalLM", "multi-head latent attention and multi-token prediction",
     "Qwen3MoeForCausalLM"},
    {"DeepseekV32ForCausalLM",
     "multi-head latent attention, sparse attention and multi-token prediction",
     "Qwen3MoeForCausalLM"},
    {"Glm4MoeForCausalLM", "partial rotary embeddings and multi-token prediction",
     "Qwen3MoeForCausalLM"},
    {"GptOssForCausalLM", "attention sinks and YaRN", "Qwen3MoeForCausalLM"},
    {"Qwen3NextForCausalLM", "gated delta nets, gated attention and partial rotary embeddings",
     "Qwen3MoeForCausalLM"},
    {"Qwen2ForCausalLM", "dense layers with biases of queries, keys and values",
     "LlamaForCausalLM"},
    {"MistralForCausalLM", "its name only: without a sliding window it is the same model",
     "LlamaForCausalLM"},
};

// What the configuration class of an architecture in transformers (4.57, 5.23: the same) takes for
// a field that the file lacks. Query groups that are null, or 0 here, are as many as query heads.
struct ClassDefaults {
  std::string_view architecture;
  double rope_theta;
  double rms_norm_eps;
  int32_t num_key_value_heads;
};
constexpr ClassDefaults kClassDefaults[] = {
    {"MixtralForCausalLM", 1e6, 1e-5, 8},   {"Qwen3MoeForCausalLM", 1e4, 1e-6, 4},
    {"Qwen2MoeForCausalLM", 1e4, 1e-6, 16}, {"OlmoeForCausalLM", 1e4, 1e-5, 0},
    {"LlamaForCausalLM", 1e4, 1e-6, 0},     {"Qwen3ForCausalLM", 1e4, 1e-6, 32}};

// Of an architecture that Troupe does not have: any, since its fields are read to be refused.
const ClassDefaults& defaults_of(std::string_view architecture) {
  for (const ClassDefaults& defaults : kClassDefaults) {
    if (defaults.architecture == architecture) return defaults;
  }
  return kClassDefaults[0];
}

bool is_dense(std::string_view architecture) {
  return architecture == "LlamaForCausalLM" || architecture == "Qwen3ForCausalLM";
}

// One configuration file, read field by field. Absent and null fields are the same unless said.
//
// What is malformed is refused at once. What is well-formed and not supported is collected, so that
// one message names all of it.
class Fields {
 public:
  Fields(const json& object, const std::string& where, std::vector<std::string>& unsupported)
      : object_(object), where_(where), unsupported_(unsupported) {}

  [[noreturn]] void refuse(const std::string& problem) const {
    throw_bad_request(fmt::format("{}: {}", where_, problem));
  }
  // Goes on, as if the field were not there.
  void add_unsupported(std::string problem) const { unsupported_.push_back(std::move(problem)); }
  void refuse_unsupported() const {
    if (!unsupported_.empty()) refuse(fmt::format("{}", fmt::join(unsupported_, " ")));
  }
  // An object within this one, under the same rules.
  Fields within(const json& object) const { return {object, where_, unsupported_}; }

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
  // A field that is present must have the value that Troupe computes.
  void expect_false(const char* name) const {
    if (boolean(name, false)) add_unsupported(fmt::format("\"{}\": true is not supported.", name));
  }
  void expect_number(const char* name, double value) const {
    if (number(name, value) == value) return;
    add_unsupported(fmt::format("\"{}\" other than {} is not supported.", name, value));
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
  std::vector<std::string>& unsupported_;
};

void read_rope(const Fields& fields, ModelConfig& config) {
  config.rotary_base = fields.number("rope_theta", defaults_of(config.hf_architecture).rope_theta);
  fields.expect_number("partial_rotary_factor", 1);
  const json* rope = fields.find({"rope_parameters", "rope_scaling"});
  if (rope == nullptr) return;
  if (!rope->is_object()) fields.refuse("\"rope_parameters\" must be an object.");
  const Fields inner = fields.within(*rope);
  const std::string type = inner.text("rope_type", inner.text("type", "default"));
  if (type != "default") {
    fields.add_unsupported(
        fmt::format("RoPE of type {} is not supported, only \"default\".", quote_name(type)));
  }
  config.rotary_base = inner.number("rope_theta", config.rotary_base);
  if (fields.find("partial_rotary_factor") == nullptr) {
    inner.expect_number("partial_rotary_factor", 1);
  }
}

// What every architecture computes alike, as far as Troupe does.
void read_computation(const Fields& fields, ModelConfig& config) {
  read_rope(fields, config);
  const std::string activation = fields.text("hidden_act", "silu");
  if (activation != "silu") {
    fields.add_unsupported(
        fmt::format("\"hidden_act\": {} is not supported, only \"silu\".", quote_name(activation)));
  }
  fields.expect_false("attention_bias");
  fields.expect_false("mlp_bias");
  fields.expect_number("attention_dropout", 0);
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

void read_common(const Fields& fields, ModelConfig& config) {
  config.vocab_size = fields.required_integer({"vocab_size"});
  read_padding_token(fields, config);
  config.hidden_size = fields.required_integer({"hidden_size"});
  config.num_layers = fields.required_integer({"num_hidden_layers"});
  config.num_attention_heads = fields.required_integer({"num_attention_heads"});
  const ClassDefaults& defaults = defaults_of(config.hf_architecture);
  const int32_t groups = defaults.num_key_value_heads;
  config.num_query_groups = fields.integer(
      {"num_key_value_heads"},
      groups == 0 || fields.mentions("num_key_value_heads") ? config.num_attention_heads : groups);
  config.max_position_embeddings = fields.required_integer({"max_position_embeddings"});
  config.norm_epsilon = fields.number("rms_norm_eps", defaults.rms_norm_eps);
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
  read_computation(fields, config);
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
  fields.expect_number("router_jitter_noise", 0);
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

// Where a window begins at a layer of its own, Troupe does not compute it.
void expect_no_window(const Fields& fields) {
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

void read_qwen2_moe(const Fields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config);
  config.add_qkv_bias = fields.boolean("qkv_bias", true);
  config.moe_shared_expert_intermediate_size =
      fields.required_integer({"shared_expert_intermediate_size"});
  config.moe_shared_expert_gate = true;
  expect_no_window(fields);
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
  if (fields.find("clip_qkv") != nullptr) fields.add_unsupported("\"clip_qkv\" is not supported.");
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
  config.moe_router_force_biased = 0;
  config.embedding_init_method_std = unset.embedding_init_method_std;
  config.init_method_xavier_uniform = false;
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

void write_qwen_moe(const ModelConfig& config, nlohmann::ordered_json& document) {
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

// Names the architecture, what it has that Troupe lacks, and whatever else the file asks for and
// does not get.
[[noreturn]] void refuse_architecture(const Fields& fields, const std::string& name) {
  std::string problem = fmt::format("the architecture {} is not supported", quote_name(name));
  for (const ForeignArchitecture& known : kForeignArchitectures) {
    if (known.name != name) continue;
    problem += fmt::format(" (missing: {}; {} comes nearest)", known.missing, known.nearest);
  }
  problem += fmt::format(". Supported: {}.", fmt::join(kArchitectures, ", "));
  fields.add_unsupported(std::move(problem));
  ModelConfig unused;
  read_computation(fields, unused);
  fields.refuse_unsupported();
  TROUPE_CHECK(false, "an architecture was refused");
}

void read_architecture(const Fields& fields, ModelConfig& config) {
  const std::string& name = config.hf_architecture;
  if (name == "MixtralForCausalLM") {
    read_mixtral(fields, config);
  } else if (name == "Qwen2MoeForCausalLM") {
    read_qwen2_moe(fields, config);
  } else if (name == "Qwen3MoeForCausalLM") {
    read_qwen3_moe(fields, config);
  } else if (name == "OlmoeForCausalLM") {
    read_olmoe(fields, config);
  } else if (name == "LlamaForCausalLM") {
    read_dense(fields, config);
  } else {
    config.qk_layernorm = true;
    read_dense(fields, config);
    expect_no_window(fields);
  }
}

// Reads the fields; whether they fit together is not checked.
ModelConfig parse_fields(std::string_view json_text, const std::string& where) {
  const json document = parse_json(json_text, where, kMaxConfigDepth);
  if (!document.is_object()) throw_bad_request(where + ": a model configuration is a JSON object.");
  std::vector<std::string> unsupported;
  const Fields fields(document, where, unsupported);

  ModelConfig config;
  const json* architectures = fields.find("architectures");
  if (architectures == nullptr || !architectures->is_array() || architectures->size() != 1 ||
      !(*architectures)[0].is_string()) {
    fields.refuse("\"architectures\" must be a list with the name of one architecture.");
  }
  config.hf_architecture = (*architectures)[0].get<std::string>();
  if (std::find(std::begin(kArchitectures), std::end(kArchitectures), config.hf_architecture) ==
      std::end(kArchitectures)) {
    refuse_architecture(fields, config.hf_architecture);
  }
  read_common(fields, config);
  read_architecture(fields, config);
  fields.refuse_unsupported();
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
  return parse_hf_config(read_file(path, kMaxHfConfigBytes), path);
}

namespace {

using nlohmann::ordered_json;

// Names under which readers look for the same thing: transformers 5, and the older versions.
constexpr std::pair<const char*, const char*> kSpellings[] = {{"num_local_experts", "num_experts"},
                                                              {"dtype", "torch_dtype"}};

// The fields of the model in every spelling, whether or not they say all of the configuration.
ordered_json render(const ModelConfig& config) {
  ordered_json document = {
      {"architectures", {config.hf_architecture}},
      {"attention_bias", false},
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
      {"rope_scaling", nullptr},
      {"rope_theta", config.rotary_base},
      {"tie_word_embeddings", config.tie_embeddings},
      {"use_cache", true},
      {"vocab_size", config.vocab_size},
  };
  if (config.num_experts > 0) {
    document["num_local_experts"] = config.num_experts;
    document["num_experts"] = config.num_experts;
    document["num_experts_per_tok"] = config.moe_router_topk;
    document["output_router_logits"] = false;
    document["router_aux_loss_coef"] = config.moe_aux_loss_coeff;
  }
  if (config.hf_architecture == "MixtralForCausalLM") {
    document["model_type"] = "mixtral";
    document["intermediate_size"] = config.moe_ffn_hidden_size;
    document["sliding_window"] = config.sliding_window > 0 ? json(config.sliding_window) : json();
    document["router_jitter_noise"] = 0.0;
  } else if (config.hf_architecture == "OlmoeForCausalLM") {
    document["model_type"] = "olmoe";
    document["intermediate_size"] = config.moe_ffn_hidden_size;
    document["norm_topk_prob"] = !config.moe_router_pre_softmax;
    document["clip_qkv"] = nullptr;
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
  return document;
}

std::string text_of(const ordered_json& document) {
  return document.dump(2) + "\n";
}

bool has(const ordered_json& document, const std::string& name) {
  return document.contains(name) && !document.at(name).is_null();
}

// The RoPE base, in the spellings that the document has.
void set_rope_theta(ordered_json& document, double value) {
  bool written = false;
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    if (!has(document, name) || !document[name].contains("rope_theta")) continue;
    document[name]["rope_theta"] = value;
    written = true;
  }
  if (has(document, "rope_theta") || !written) document["rope_theta"] = value;
}

// A field in the spellings that the document has, or in all.
void set_field(ordered_json& document, const std::string& name, const ordered_json& value) {
  if (name == "rope_parameters" || name == "rope_scaling") return;  // rope_theta stands for them
  if (name == "rope_theta") return set_rope_theta(document, value.get<double>());
  for (const auto& [newer, older] : kSpellings) {
    if (name != newer && name != older) continue;
    const bool either = has(document, newer) || has(document, older);
    if (either && !has(document, name)) return;
  }
  document[name] = value;
}

// A document of the source, with what differs between the model that it describes and this one.
void apply_changes(ordered_json& document, const ModelConfig& before, const ModelConfig& after) {
  const ordered_json old_fields = render(before);
  const ordered_json new_fields = render(after);
  for (const auto& [name, value] : new_fields.items()) {
    if (old_fields.contains(name) && old_fields.at(name) == value) continue;
    // Without dense layers the field means nothing.
    const bool idle = name == "intermediate_size" && new_fields.contains("moe_intermediate_size") &&
                      after.ffn_hidden_size == 0;
    if (!idle) set_field(document, name, value);
  }
  if (before.moe_layers != after.moe_layers && document.contains("decoder_sparse_step")) {
    document["decoder_sparse_step"] = 1;  // mlp_only_layers names the dense ones
  }
  if (before.num_layers != after.num_layers) {
    document.erase("layer_types");  // one for each layer, and all alike
  }
}

// A document in which a source adds what the model does not say.
ordered_json overlay(const ordered_json& source, const ModelConfig& config) {
  ordered_json document = source;
  const ordered_json fields = render(config);
  for (const auto& [name, value] : fields.items()) {
    const bool idle = name == "intermediate_size" && document.contains("moe_intermediate_size") &&
                      config.ffn_hidden_size == 0;
    if (idle || (name == "use_cache" && has(document, name))) continue;
    document[name] = value;
  }
  if (document.contains("layer_types") &&
      document["layer_types"].size() != static_cast<size_t>(config.num_layers)) {
    document.erase("layer_types");
  }
  return document;
}

void set_token_ids(ordered_json& document, const HfTokenIds& tokens) {
  document["bos_token_id"] = tokens.bos ? ordered_json(*tokens.bos) : ordered_json();
  document["eos_token_id"] = tokens.eos ? ordered_json(*tokens.eos) : ordered_json();
}

// What a text says otherwise than the configuration, as "field = value" of the configuration.
std::vector<std::string> lost_fields(const ModelConfig& config, const std::string& text) {
  const ModelConfig read = parse_fields(text, "config.json");
  const json wanted = json::parse(write_model_config(without_idle_fields(config)));
  const json found = json::parse(write_model_config(without_idle_fields(read)));
  std::vector<std::string> lost;
  for (const auto& [name, value] : wanted.items()) {
    if (found.at(name) != value) lost.push_back(fmt::format("{} = {}", name, value.dump()));
  }
  return lost;
}

// What a config.json of the configuration's architecture cannot say of it.
std::vector<std::string> lost_fields(const ModelConfig& config) {
  if (is_dense(config.hf_architecture) != (config.num_experts == 0)) {
    return {fmt::format("num_experts = {}", config.num_experts)};
  }
  return lost_fields(config, text_of(render(config)));
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

std::string why_no_hf_form(const ModelConfig& config) {
  const bool named = !config.hf_architecture.empty();
  const ModelConfig written = named ? config : with_nearest_architecture(config);
  const std::vector<std::string> lost = lost_fields(written);
  if (named && lost.empty()) return "";
  return fmt::format(
      "A config.json of {}{} cannot express {}, so this model has no Hugging Face form that "
      "Troupe could write.",
      written.hf_architecture, named ? "" : ", the nearest of the architectures that Troupe knows,",
      fmt::join(lost, ", "));
}

namespace {

// The document of a source whose weights the model has gone on from: with as few changes as say it.
ordered_json changed_source(const ordered_json& original, const ModelConfig& before,
                            const ModelConfig& config) {
  ordered_json document = original;
  apply_changes(document, before, config);
  // A field that the source leaves out may follow from one that has changed.
  return lost_fields(config, text_of(document)).empty() ? document : overlay(original, config);
}

}  // namespace

std::string write_hf_config(const ModelConfig& config, const HfConfigSource& source) {
  const std::string problem = why_no_hf_form(config);
  if (!problem.empty()) throw_bad_request(problem);
  ordered_json original = ordered_json::object();
  ordered_json document = render(config);
  bool is_own = true;
  if (!source.text.empty()) {
    const ModelConfig before = parse_fields(source.text, source.where);
    original = ordered_json::parse(source.text);
    if (before.hf_architecture == config.hf_architecture) {
      is_own = !source.has_weights;
      document = is_own ? overlay(original, config) : changed_source(original, before, config);
    }
  }
  if (source.tokens) {
    set_token_ids(document, *source.tokens);
  } else {
    for (const char* name : {"bos_token_id", "eos_token_id"}) {
      if (original.contains(name)) document[name] = original[name];
    }
  }
  for (const char* name : {"dtype", "torch_dtype"}) {
    if (!source.dtype.empty() && (is_own || has(document, name))) document[name] = source.dtype;
  }
  std::string text = document == original ? source.text : text_of(document);
  TROUPE_CHECK(lost_fields(config, text).empty(), "a config.json says what its model is");
  return text;
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
