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

constexpr int kMaxDepth = 4;

// Calls visit(name, member) for every field, in the order of the struct.
template <class Config, class Visit>
void for_each_field(Config& config, const Visit& visit) {
  visit("vocab_size", config.vocab_size);
  visit("hidden_size", config.hidden_size);
  visit("num_layers", config.num_layers);
  visit("num_attention_heads", config.num_attention_heads);
  visit("num_query_groups", config.num_query_groups);
  visit("kv_channels", config.kv_channels);
  visit("qk_layernorm", config.qk_layernorm);
  visit("sliding_window", config.sliding_window);
  visit("rotary_base", config.rotary_base);
  visit("max_position_embeddings", config.max_position_embeddings);
  visit("ffn_hidden_size", config.ffn_hidden_size);
  visit("norm_epsilon", config.norm_epsilon);
  visit("tie_embeddings", config.tie_embeddings);
  visit("num_experts", config.num_experts);
  visit("moe_router_topk", config.moe_router_topk);
  visit("moe_ffn_hidden_size", config.moe_ffn_hidden_size);
  visit("moe_router_pre_softmax", config.moe_router_pre_softmax);
  visit("moe_layers", config.moe_layers);
  visit("moe_aux_loss_coeff", config.moe_aux_loss_coeff);
  visit("moe_z_loss_coeff", config.moe_z_loss_coeff);
  visit("init_method_std", config.init_method_std);
  visit("hf_architecture", config.hf_architecture);
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
    if constexpr (std::is_same_v<T, double>) {
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
    found->get_to(value);
  }
}

}  // namespace

std::string write_model_config(const ModelConfig& config) {
  nlohmann::ordered_json document;
  for_each_field(config, [&](const char* name, const auto& value) { document[name] = value; });
  return document.dump(2) + "\n";
}

ModelConfig parse_model_config(std::string_view text, const std::string& where) {
  const nlohmann::json document = parse_json(text, where, kMaxDepth);
  if (!document.is_object()) {
    throw_failed(where + ": the description of the model is not a JSON object.");
  }
  ModelConfig config;
  size_t known = 0;
  for_each_field(config, [&](const char* name, auto& value) {
    read_field(document, name, where, value);
    ++known;
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
