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
#include "io/hf_families.h"
#include "io/hf_fields.h"
#include "io/json.h"
#include "io/model_config_json.h"
#include "model/model_problems.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr int kMaxConfigDepth = 16;

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
      {"rotary_percent", "partial_rotary_factor"},
      {"rope_scaling_type", "rope_type"},
      {"rope_scaling_factor", "factor"},
      {"rope_original_positions", "original_max_position_embeddings"},
      {"rope_mscale", "mscale"},
      {"qk_pos_emb_head_dim", "qk_rope_head_dim"},
      {"moe_router_num_groups", "n_group"},
      {"moe_router_group_topk", "topk_group"},
      {"moe_router_topk_scaling_factor", "routed_scaling_factor"},
      {"init_method_std", "initializer_range"},
      {"padding_token", "pad_token_id"},
      {"dsa_indexer_topk", "index_topk"},
      {"dsa_indexer_n_heads", "index_n_heads"},
      {"dsa_indexer_head_dim", "index_head_dim"},
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
  config.mtp_num_layers = 0;
  config.mtp_loss_scaling_factor = unset.mtp_loss_scaling_factor;
  config.mtp_use_repeated_layer = false;
  config.hidden_dropout = 0;
  config.attention_dropout = 0;
  config.moe_seq_aux_loss_coeff = 0;
  config.moe_global_aux_loss_coeff = 0;
  config.moe_z_loss_coeff = 0;
  config.dsa_indexer_loss_coeff = 0;
  config.dsa_indexer_use_sparse_loss = false;
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
  config.moe_router_bias_update_rate = unset.moe_router_bias_update_rate;
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
    config.moe_layers.clear();
    config.moe_aux_loss_coeff = 0;
  } else if (config.moe_layer_count() == config.num_layers) {
    config.ffn_hidden_size = 0;
  }
  return config;
}

// Models that also see: what they are called, and their text models.
constexpr std::pair<std::string_view, std::string_view> kSeeingArchitectures[] = {
    {"Qwen3_5MoeForConditionalGeneration", kQwen35MoeArchitecture}};

// Of a configuration: the text model's architecture; empty where it is of nothing else.
template <class Json>
std::string_view text_architecture_of(const Json& document) {
  const auto names = document.find("architectures");
  if (names == document.end() || !names->is_array() || names->size() != 1) return "";
  for (const auto& [whole, text] : kSeeingArchitectures) {
    if ((*names)[0] == whole) return text;
  }
  return "";
}

// The text model's configuration as it is written where it stands alone.
template <class Json>
Json text_model_of(const Json& document, const std::string& where) {
  const std::string_view architecture = text_architecture_of(document);
  if (architecture.empty()) return document;
  const auto text = document.find("text_config");
  if (text == document.end() || !text->is_object()) {
    throw_bad_request(where + ": the field \"text_config\" must be an object.");
  }
  Json model = *text;
  model["architectures"] = Json::array({architecture});
  for (const char* name : {"dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"}) {
    if (document.contains(name)) model[name] = document[name];
  }
  return model;
}

json parse_text_model(std::string_view json_text, const std::string& where) {
  const json document = parse_json(json_text, where, kMaxConfigDepth);
  if (!document.is_object()) throw_bad_request(where + ": a model configuration is a JSON object.");
  return text_model_of(document, where);
}

// Reads the fields; whether they fit together is not checked.
ModelConfig collect_fields(const HfFields& fields) {
  ModelConfig config;
  const json* architectures = fields.find("architectures");
  if (architectures == nullptr || !architectures->is_array() || architectures->size() != 1 ||
      !(*architectures)[0].is_string()) {
    fields.refuse("\"architectures\" must be a list with the name of one architecture.");
  }
  const auto name = (*architectures)[0].get<std::string>();
  const HfFamily* family = find_hf_family(name);
  if (family == nullptr) refuse_hf_architecture(fields, name);
  read_hf_family(*family, fields, config);
  return config;
}

// Refuses what Troupe does not compute.
ModelConfig parse_fields(std::string_view json_text, const std::string& where) {
  const json document = parse_text_model(json_text, where);
  HfProblems problems;
  const HfFields fields(document, where, problems);
  ModelConfig config = collect_fields(fields);
  if (!problems.empty()) fields.refuse_collected();
  return config;
}

}  // namespace

ModelConfig parse_hf_config(std::string_view json_text, const std::string& where) {
  const json document = parse_text_model(json_text, where);
  HfProblems problems;
  const HfFields fields(document, where, problems);
  ModelConfig config = collect_fields(fields);
  if (!problems.any_replaced) {
    constexpr std::string_view kSubject = "Model configuration: ";  // said once is enough
    for (const std::string& problem : problems_of(config)) {
      const bool is_first = problems.sentences.empty() || !problem.starts_with(kSubject);
      problems.sentences.push_back(in_hf_terms(problem.substr(is_first ? 0 : kSubject.size())));
    }
  }
  if (!problems.empty()) fields.refuse_collected();
  return config;
}

ModelConfig read_hf_config(const std::string& path) {
  return parse_hf_config(read_file(path, kMaxHfConfigBytes), path);
}

namespace {

// `otherwise`: where the text says nothing.
int32_t stated_prediction_layers(const std::string& text, const std::string& where,
                                 int32_t otherwise) {
  const json document = parse_text_model(text, where);
  HfProblems problems;
  const HfFields fields(document, where, problems);
  const int32_t layers =
      fields.integer({"num_nextn_predict_layers", "mtp_num_hidden_layers"}, otherwise);
  if (!problems.empty()) fields.refuse_collected();
  return std::max(0, layers);
}

}  // namespace

int32_t hf_announced_prediction_layers(const std::string& config_path) {
  return stated_prediction_layers(read_file(config_path, kMaxHfConfigBytes), config_path, 0);
}

int32_t hf_prediction_layers(const std::string& config_path) {
  const std::string text = read_file(config_path, kMaxHfConfigBytes);
  const HfFamily* family = find_hf_family(parse_fields(text, config_path).hf_architecture);
  // Folders with names of their own for it hold one, of which config.json may say nothing.
  const bool is_silent = family != nullptr && family->mtp == HfMtpNames::apart;
  return stated_prediction_layers(text, config_path, is_silent ? 1 : 0);
}

bool hf_also_sees(const std::string& config_path) {
  const json document =
      parse_json(read_file(config_path, kMaxHfConfigBytes), config_path, kMaxConfigDepth);
  return document.is_object() && !text_architecture_of(document).empty();
}

namespace {

using nlohmann::ordered_json;

// Names under which readers look for the same thing: transformers 5, and the older versions.
constexpr std::pair<const char*, const char*> kSpellings[] = {{"num_local_experts", "num_experts"},
                                                              {"dtype", "torch_dtype"}};

// Beside the base: what a rope_parameters has where its kind asks for it.
constexpr const char* kRopeScalingFields[] = {
    "factor",           "original_max_position_embeddings",
    "high_freq_factor", "low_freq_factor",
    "beta_fast",        "beta_slow",
    "truncate",         "mscale",
    "mscale_all_dim",   "attention_factor"};

const HfFamily& family_of(const ModelConfig& config) {
  const HfFamily* family = find_hf_family(config.hf_architecture);
  TROUPE_CHECK(family != nullptr, "an architecture that is written");
  return *family;
}

ordered_json render(const ModelConfig& config) {
  return render_hf_config(family_of(config), config);
}

std::string text_of(const ordered_json& document) {
  return document.dump(2) + "\n";
}

bool has(const ordered_json& document, const std::string& name) {
  return document.contains(name) && !document.at(name).is_null();
}

// The angles of positions, in the spellings that the document has.
void set_rope(ordered_json& document, const ordered_json& fields) {
  const ordered_json& parameters = fields["rope_parameters"];
  bool written = false;
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    if (!has(document, name)) continue;
    ordered_json& rope = document[name];
    for (const char* scaling : kRopeScalingFields) {
      if (!parameters.contains(scaling)) rope.erase(scaling);
    }
    for (const auto& [field, value] : parameters.items()) {
      if (field != "rope_theta" || rope.contains(field)) rope[field] = value;
    }
    if (rope.contains("type")) rope["type"] = parameters["rope_type"];
    written = written || rope.contains("rope_theta");
  }
  if (has(document, "rope_theta") || !written) document["rope_theta"] = parameters["rope_theta"];
  if (!has(document, "rope_parameters") && !has(document, "rope_scaling") &&
      !fields["rope_scaling"].is_null()) {
    document["rope_scaling"] = fields["rope_scaling"];
  }
}

// A field in the spellings that the document has, or in all.
void set_field(ordered_json& document, const std::string& name, const ordered_json& value) {
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
    if (name == "rope_parameters") set_rope(document, new_fields);
    if (name.starts_with("rope_")) continue;  // rope_parameters stands for all of them
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
  if (family_of(config).has_experts != (config.num_experts > 0)) {
    return {fmt::format("num_experts = {}", config.num_experts)};
  }
  std::vector<std::string> lost = lost_fields(config, text_of(render(config)));
  const HfMtpNames names = family_of(config).mtp;
  const int32_t most = names == HfMtpNames::none ? 0 : names == HfMtpNames::apart ? 1 : 100;
  if (config.own_mtp_layers() > most) {
    lost.push_back(fmt::format("mtp_num_layers = {}", config.mtp_num_layers));
  }
  return lost;
}

// All where the architecture has no form for the model: its reader refuses what is written.
size_t count_lost_fields(const ModelConfig& config) {
  try {
    return lost_fields(config).size();
  } catch (const UserError&) {
    return std::numeric_limits<size_t>::max();
  }
}

// With the name of that architecture, among those with experts or those without, which says most of
// the configuration.
ModelConfig with_nearest_architecture(ModelConfig config) {
  size_t fewest = std::numeric_limits<size_t>::max();
  std::string nearest;
  for (const HfFamily& family : hf_families()) {
    if (family.has_experts != (config.num_experts > 0)) continue;
    config.hf_architecture = family.architecture;
    const size_t lost = count_lost_fields(config);
    if (lost >= fewest) continue;
    fewest = lost;
    nearest = family.architecture;
  }
  config.hf_architecture = nearest;
  return config;
}

}  // namespace

std::string why_no_hf_form(const ModelConfig& config) {
  const bool named = find_hf_family(config.hf_architecture) != nullptr;
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
  ordered_json whole = ordered_json::object();     // of the source
  ordered_json original = ordered_json::object();  // its text model
  ordered_json document = render(config);
  bool is_own = true;
  if (!source.text.empty()) {
    ModelConfig before = parse_fields(source.text, source.where);
    before.mtp_num_layers = stated_prediction_layers(source.text, source.where, 0);
    whole = ordered_json::parse(source.text);
    original = text_model_of(whole, source.where);
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
  if (source.quantization_config) {
    document.erase("quantization_config");
    if (!source.quantization_config->empty()) {
      document["quantization_config"] = ordered_json::parse(*source.quantization_config);
    }
  }
  std::string text = document == whole ? source.text : text_of(document);
  TROUPE_CHECK(lost_fields(config, text).empty(), "a config.json says what its model is");
  return text;
}

std::string fitting_hf_architecture(const ModelConfig& config) {
  ModelConfig named = config;
  const auto fits = [&](std::string_view name) {
    named.hf_architecture = name;
    return count_lost_fields(named) == 0;
  };
  if (find_hf_family(config.hf_architecture) != nullptr && fits(config.hf_architecture)) {
    return config.hf_architecture;
  }
  for (const HfFamily& family : hf_families()) {
    if (fits(family.architecture)) return std::string(family.architecture);
  }
  return "";
}

}  // namespace troupe
