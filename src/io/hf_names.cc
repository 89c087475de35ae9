#include "io/hf_names.h"

#include <algorithm>
#include <fmt/format.h>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "model/model.h"

namespace troupe {
namespace {

// What a parameter is called: a tensor for each section of the cut of its rows, or one for all of
// it. Of experts each has tensors of its own, with its number for the braces; names without braces
// are of all experts together.
struct HfName {
  std::string_view parameter;  // within its layer (ParameterSpec::name)
  bool of_experts = false;
  std::vector<std::string_view> tensors = {};
  HfArrangement arrangement = {};
  // Of all experts together: a folder may have one tensor of this name instead.
  std::string_view together = {};
  // Where the parameter has all parts of one head (parts_of_head) before those of the next: how
  // many parts each tensor has, of which it has those of all heads one after the other.
  std::vector<size_t> parts = {};
};
using HfNames = std::vector<HfName>;

// Of the embedding, and of a router's bias within its layer.
constexpr const char* kEmbedding = "model.embed_tokens.weight";
// How names begin, and how they do where the text model is part of one that also sees.
constexpr std::string_view kModel = "model.";
constexpr std::string_view kTextModel = "model.language_model.";
constexpr std::string_view kRouterBias = "mlp.gate.e_score_correction_bias";
constexpr std::string_view kMiniMaxM2RouterBias = "block_sparse_moe.e_score_correction_bias";
constexpr std::string_view kLing2RouterBias = "mlp.gate.expert_bias";
constexpr const char* kLing2Embedding = "model.word_embeddings.weight";

std::string_view router_bias_of(std::string_view architecture) {
  if (architecture == kMiniMaxM2Architecture) return kMiniMaxM2RouterBias;
  return architecture == kLing2Architecture ? kLing2RouterBias : kRouterBias;
}
// Outside the layers, and within "model.layers.N.".
const HfNames& common_names() {
  static const HfNames kNames = {
      {.parameter = "embedding", .tensors = {kEmbedding}},
      {.parameter = "final_norm", .tensors = {"model.norm.weight"}},
      {.parameter = "head", .tensors = {kHfHead}},
      {.parameter = "input_norm", .tensors = {"input_layernorm.weight"}},
      {.parameter = "w_qkv",
       .tensors = {"self_attn.q_proj.weight", "self_attn.k_proj.weight",
                   "self_attn.v_proj.weight"}},
      {.parameter = "b_qkv",
       .tensors = {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}},
      {.parameter = "q_norm", .tensors = {"self_attn.q_norm.weight"}},
      {.parameter = "k_norm", .tensors = {"self_attn.k_norm.weight"}},
      {.parameter = "w_q", .tensors = {"self_attn.q_proj.weight"}},
      {.parameter = "w_q_down", .tensors = {"self_attn.q_a_proj.weight"}},
      {.parameter = "q_latent_norm", .tensors = {"self_attn.q_a_layernorm.weight"}},
      {.parameter = "w_q_up", .tensors = {"self_attn.q_b_proj.weight"}},
      {.parameter = "w_kv_down", .tensors = {"self_attn.kv_a_proj_with_mqa.weight"}},
      {.parameter = "kv_latent_norm", .tensors = {"self_attn.kv_a_layernorm.weight"}},
      {.parameter = "w_kv_up", .tensors = {"self_attn.kv_b_proj.weight"}},
      {.parameter = "w_attention_out", .tensors = {"self_attn.o_proj.weight"}},
      {.parameter = "post_attention_norm", .tensors = {"post_attention_layernorm.weight"}},
      {.parameter = "w_gate_up", .tensors = {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
      {.parameter = "w_down", .tensors = {"mlp.down_proj.weight"}},
      {.parameter = "w_router", .tensors = {"mlp.gate.weight"}},
      {.parameter = "w_gate_up",
       .of_experts = true,
       .tensors = {"mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"}},
      {.parameter = "w_down", .of_experts = true, .tensors = {"mlp.experts.{}.down_proj.weight"}},
      {.parameter = "w_shared_gate_up",
       .tensors = {"mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"}},
      {.parameter = "w_shared_down", .tensors = {"mlp.shared_expert.down_proj.weight"}},
      {.parameter = "w_shared_gate", .tensors = {"mlp.shared_expert_gate.weight"}},
  };
  return kNames;
}

// Where an architecture has other names.
const HfNames& names_of(std::string_view architecture) {
  static const HfNames kMixtral = {
      {.parameter = "w_router", .tensors = {"block_sparse_moe.gate.weight"}},
      {.parameter = "w_gate_up",
       .of_experts = true,
       .tensors = {"block_sparse_moe.experts.{}.w1.weight",
                   "block_sparse_moe.experts.{}.w3.weight"}},
      {.parameter = "w_down",
       .of_experts = true,
       .tensors = {"block_sparse_moe.experts.{}.w2.weight"}},
  };
  static const HfNames kDeepseek = {
      {.parameter = "w_shared_gate_up",
       .tensors = {"mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"}},
      {.parameter = "w_shared_down", .tensors = {"mlp.shared_experts.down_proj.weight"}},
      {.parameter = "mtp_embedding_norm", .tensors = {"enorm.weight"}},
      {.parameter = "mtp_hidden_norm", .tensors = {"hnorm.weight"}},
      {.parameter = "w_mtp", .tensors = {"eh_proj.weight"}},
      {.parameter = "mtp_final_norm", .tensors = {"shared_head.norm.weight"}},
  };
  static const HfNames kDeepseekV32 = [] {
    HfNames names = kDeepseek;
    names.insert(
        names.end(),
        {{.parameter = "w_index_q", .tensors = {"self_attn.indexer.wq_b.weight"}},
         {.parameter = "w_index_k", .tensors = {"self_attn.indexer.wk.weight"}},
         {.parameter = "index_k_norm", .tensors = {"self_attn.indexer.k_norm.weight"}},
         {.parameter = "index_k_norm_bias", .tensors = {"self_attn.indexer.k_norm.bias"}},
         {.parameter = "w_index_weights", .tensors = {"self_attn.indexer.weights_proj.weight"}}});
    return names;
  }();
  static const HfNames kGptOss = {
      {.parameter = "sinks", .tensors = {"self_attn.sinks"}},
      {.parameter = "b_attention_out", .tensors = {"self_attn.o_proj.bias"}},
      {.parameter = "w_router", .tensors = {"mlp.router.weight"}},
      {.parameter = "b_router", .tensors = {"mlp.router.bias"}},
      {.parameter = "w_gate_up",
       .of_experts = true,
       .tensors = {"mlp.experts.gate_up_proj"},
       .arrangement = {.transposed = true, .interleaved = true}},
      {.parameter = "b_gate_up",
       .of_experts = true,
       .tensors = {"mlp.experts.gate_up_proj_bias"},
       .arrangement = {.interleaved = true}},
      {.parameter = "w_down",
       .of_experts = true,
       .tensors = {"mlp.experts.down_proj"},
       .arrangement = {.transposed = true}},
      {.parameter = "b_down", .of_experts = true, .tensors = {"mlp.experts.down_proj_bias"}},
  };
  static const HfNames kQwen3Next = {
      {.parameter = "w_delta_in", .tensors = {"linear_attn.in_proj_qkvz.weight"}},
      {.parameter = "w_delta_gates", .tensors = {"linear_attn.in_proj_ba.weight"}},
      {.parameter = "delta_conv",
       .tensors = {"linear_attn.conv1d.weight"},
       .arrangement = {.has_unit_dimension = true}},
      {.parameter = "delta_decay", .tensors = {"linear_attn.A_log"}},
      {.parameter = "delta_bias", .tensors = {"linear_attn.dt_bias"}},
      {.parameter = "delta_norm", .tensors = {"linear_attn.norm.weight"}},
      {.parameter = "w_delta_out", .tensors = {"linear_attn.out_proj.weight"}},
      {.parameter = "mtp_embedding_norm", .tensors = {"pre_fc_norm_embedding.weight"}},
      {.parameter = "mtp_hidden_norm", .tensors = {"pre_fc_norm_hidden.weight"}},
      {.parameter = "w_mtp", .tensors = {"fc.weight"}},
      {.parameter = "mtp_final_norm", .tensors = {"norm.weight"}},
  };
  static const HfNames kQwen35Moe = [] {
    HfNames names = kQwen3Next;
    std::erase_if(names, [](const HfName& name) {
      return name.parameter == "w_delta_in" || name.parameter == "w_delta_gates";
    });
    names.insert(names.end(),
                 {{.parameter = "w_delta_in",
                   .tensors = {"linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"},
                   .parts = {3, 1}},
                  {.parameter = "w_delta_gates",
                   .tensors = {"linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"},
                   .parts = {1, 1}},
                  {.parameter = "w_gate_up",
                   .of_experts = true,
                   .tensors = {"mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"},
                   .together = "mlp.experts.gate_up_proj"},
                  {.parameter = "w_down",
                   .of_experts = true,
                   .tensors = {"mlp.experts.{}.down_proj.weight"},
                   .together = "mlp.experts.down_proj"}});
    return names;
  }();
  static const HfNames kLing2 = {
      {.parameter = "embedding", .tensors = {kLing2Embedding}},
      {.parameter = "w_qkv", .tensors = {"attention.query_key_value.weight"}},
      {.parameter = "b_qkv", .tensors = {"attention.query_key_value.bias"}},
      {.parameter = "q_norm", .tensors = {"attention.query_layernorm.weight"}},
      {.parameter = "k_norm", .tensors = {"attention.key_layernorm.weight"}},
      {.parameter = "w_attention_out", .tensors = {"attention.dense.weight"}},
      {.parameter = "w_shared_gate_up",
       .tensors = {"mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"}},
      {.parameter = "w_shared_down", .tensors = {"mlp.shared_experts.down_proj.weight"}},
  };
  static const HfNames kNone;
  if (architecture == kLing2Architecture) return kLing2;
  if (architecture == kQwen3NextArchitecture) return kQwen3Next;
  if (architecture == kQwen35MoeArchitecture) return kQwen35Moe;
  if (architecture == "GptOssForCausalLM") return kGptOss;
  if (architecture == "MixtralForCausalLM" || architecture == kMiniMaxM2Architecture) {
    return kMixtral;
  }
  if (architecture == kDeepseekV32Architecture) return kDeepseekV32;
  if (architecture == "DeepseekV2ForCausalLM" || architecture == "DeepseekV3ForCausalLM" ||
      architecture == "Glm4MoeForCausalLM") {
    return kDeepseek;
  }
  return kNone;
}

std::string layer_prefix(int32_t layer, const ModelConfig& config) {
  if (layer < 0) return "";
  const bool apart = layer >= config.num_layers && hf_mtp_names_of(config) == HfMtpNames::apart;
  return apart ? fmt::format("mtp.layers.{}.", layer - config.num_layers)
               : fmt::format("model.layers.{}.", layer);
}

// Of a parameter's tensors. What a layer of multi-token prediction has beside a layer of the
// model's kind stands outside of that layer where the names are apart.
std::string prefix_of(const ParameterSpec& parameter, const ModelConfig& config) {
  const bool beside = parameter.is_of_mtp && hf_mtp_names_of(config) == HfMtpNames::apart;
  return beside ? "mtp." : layer_prefix(parameter.layer, config);
}

// What the parameter has of each head, one after the other, in rows.
std::vector<int64_t> parts_of_head(std::string_view parameter, const ModelConfig& config) {
  const int64_t value_heads = config.linear_num_value_heads / config.linear_num_key_heads;
  const int64_t keys = config.linear_key_head_dim;
  const int64_t values = value_heads * config.linear_value_head_dim;
  if (parameter == "w_delta_in") return {keys, keys, values, values};  // of q, k, v, z
  TROUPE_CHECK(parameter == "w_delta_gates", "a parameter by heads");
  return {value_heads, value_heads};  // of b, a
}

// HfName::parts.
std::vector<HfTensor> tensors_by_part(const ParameterSpec& parameter, const ModelConfig& config,
                                      const std::vector<size_t>& parts_of_tensors,
                                      const std::function<std::string(size_t)>& name_of_tensor) {
  const std::vector<int64_t> parts = parts_of_head(parameter.name, config);
  const int64_t columns = parameter.whole_shape[1];
  const int64_t rows_of_head = std::accumulate(parts.begin(), parts.end(), int64_t{0});
  std::vector<HfTensor> tensors;
  size_t part = 0;
  int64_t before = 0;  // rows of a head
  for (size_t i = 0; i < parts_of_tensors.size(); ++i) {
    HfTensor tensor{.name = name_of_tensor(i), .shape = {}, .parameter = parameter.id};
    int64_t rows = 0;
    for (const size_t end = part + parts_of_tensors[i]; part < end; before += parts[part++]) {
      for (int64_t head = 0; head < config.linear_num_key_heads; ++head) {
        tensor.scattered.push_back({.first = rows * columns,
                                    .elements = parts[part] * columns,
                                    .offset = (head * rows_of_head + before) * columns});
        rows += parts[part];
      }
    }
    tensor.shape = {rows, columns};
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// Of embedding and head, in each layer of multi-token prediction.
void add_mtp_copies(const Model& model, std::vector<HfTensor>& tensors) {
  const ModelConfig& config = model.config();
  const int32_t end = config.num_layers + config.own_mtp_layers();
  for (int32_t layer = config.num_layers; layer < end; ++layer) {
    const auto add = [&](const char* name, ParameterId id, const char* copy_of) {
      tensors.push_back({.name = layer_prefix(layer, config) + name,
                         .shape = {config.vocab_size, config.hidden_size},
                         .parameter = id,
                         .copy_of = copy_of});
    };
    const bool tied = config.tie_embeddings;
    add("embed_tokens.weight", model.embedding(), kEmbedding);
    add("shared_head.head.weight", model.head(), tied ? kEmbedding : kHfHead);
  }
}

}  // namespace

bool is_hf_router_bias(std::string_view tensor) {
  return tensor.ends_with(kRouterBias) || tensor.ends_with(kMiniMaxM2RouterBias) ||
         tensor.ends_with(kLing2RouterBias);
}

const char* hf_embedding_of(std::string_view architecture) {
  return architecture == kLing2Architecture ? kLing2Embedding : kEmbedding;
}

HfMtpNames hf_mtp_names_of(const ModelConfig& config) {
  const HfFamily* family = find_hf_family(config.hf_architecture);
  return family == nullptr ? HfMtpNames::none : family->mtp;
}

std::string hf_name_in(const SafetensorsFolder& folder, const ModelConfig& config,
                       const std::string& name) {
  const bool may_see = config.hf_architecture == kQwen35MoeArchitecture;
  if (!may_see || !name.starts_with(kModel) || name.starts_with(kTextModel)) return name;
  const bool sees = folder.find(fmt::format("{}embed_tokens.weight", kTextModel)).entry != nullptr;
  return sees ? fmt::format("{}{}", kTextModel, name.substr(kModel.size())) : name;
}

bool is_of_hf_vision(const SafetensorsFolder& folder, const ModelConfig& config,
                     std::string_view name) {
  return name.starts_with("model.visual.") &&
         hf_name_in(folder, config, kEmbedding) != std::string_view(kEmbedding);
}

std::vector<HfTensor> hf_tensors_of(const ParameterSpec& parameter, const ModelConfig& config,
                                    const SafetensorsFolder* folder) {
  const HfNames& own = names_of(config.hf_architecture);
  const bool of_experts = parameter.gradient_class == GradientClass::expert;
  const auto is_name = [&](const HfName& name) {
    return name.parameter == parameter.name && name.of_experts == of_experts;
  };
  auto name = std::find_if(own.begin(), own.end(), is_name);
  if (name == own.end()) {
    name = std::find_if(common_names().begin(), common_names().end(), is_name);
    if (name == common_names().end()) {
      throw_bad_request(fmt::format(
          "The parameter {} has no name in Hugging Face's architectures that Troupe writes.",
          parameter.full_name()));
    }
  }
  // The shape of one expert's, or of all.
  const Shape& whole = parameter.whole_shape;
  const std::string prefix = prefix_of(parameter, config);
  const auto full_name = [&](std::string_view own_name) {
    const std::string full = prefix + std::string(own_name);
    return folder == nullptr ? full : hf_name_in(*folder, config, full);
  };
  if (!name->parts.empty())
    return tensors_by_part(parameter, config, name->parts,
                           [&](size_t i) { return full_name(name->tensors[i]); });
  std::string_view together = name->together;
  if (of_experts && name->tensors.front().find('{') == std::string_view::npos) {
    together = name->tensors.front();
  } else if (!together.empty() &&
             (folder == nullptr || folder->find(full_name(together)).entry == nullptr)) {
    together = {};
  }
  if (!together.empty()) {
    return {{.name = full_name(together),
             .shape = whole,
             .arrangement = name->arrangement,
             .parameter = parameter.id}};
  }
  const int rows = of_experts ? 1 : 0;
  std::vector<int64_t> extents;
  for (int i = rows; i < whole.rank(); ++i) extents.push_back(whole[i]);
  std::vector<int64_t> sections = {whole[rows]};
  for (const Cut& cut : parameter.cuts) {
    if (cut.dimension != rows || name->tensors.size() == 1) continue;
    sections.clear();
    for (const CutSection& section : cut.sections) sections.push_back(section.size);
  }
  TROUPE_CHECK(sections.size() == name->tensors.size(),
               "a tensor for each section of " + parameter.full_name());
  std::vector<HfTensor> tensors;
  int64_t offset = 0;
  for (int64_t expert = 0; expert < (of_experts ? whole[0] : 1); ++expert) {
    for (size_t i = 0; i < sections.size(); ++i) {
      extents.front() = sections[i];
      const Shape shape(extents);
      tensors.push_back({.name = full_name(fmt::format(fmt::runtime(name->tensors[i]), expert)),
                         .shape = shape,
                         .arrangement = name->arrangement,
                         .parameter = parameter.id,
                         .offset = offset});
      offset += shape.elements();
    }
  }
  return tensors;
}

std::vector<HfTensor> hf_tensors(const ModelConfig& config, const SafetensorsFolder* folder) {
  const Model model(config);
  std::vector<HfTensor> tensors;
  for (const ParameterSpec& parameter : model.parameters()) {
    std::vector<HfTensor> own = hf_tensors_of(parameter, config, folder);
    tensors.insert(tensors.end(), std::make_move_iterator(own.begin()),
                   std::make_move_iterator(own.end()));
  }
  if (hf_mtp_names_of(config) == HfMtpNames::as_layers) add_mtp_copies(model, tensors);
  for (const RouterStateSpec& state : model.router_states()) {
    tensors.push_back({.name = layer_prefix(state.layer, config) +
                               std::string(router_bias_of(config.hf_architecture)),
                       .shape = state.shape,
                       .parameter = {},
                       .layer = state.layer});
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const HfTensor& a, const HfTensor& b) { return a.name < b.name; });
  return tensors;
}

}  // namespace troupe
