// Qwen3.5: the names and the cutting of what Qwen3-Next has in other tensors, experts that a folder
// holds together or one by one, and text models that are part of one that also sees.
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "io/io_test_support.h"
#include "io/safetensors.h"

namespace troupe {
namespace qwen35 {

using namespace io_test;
using nlohmann::json;

std::string reference(const std::string& name) {
  return TROUPE_FIXTURE_DIR "/hf/" + name;
}

constexpr uint64_t kWholeFile = 1 << 30;

// A folder's model in f32, in memory.
struct Model35 {
  explicit Model35(const std::string& folder, int32_t mtp_layers = 0)
      : config(with_mtp(read_hf_config(folder + "/config.json"), mtp_layers)),
        state(declare_model_state(config, DType::f32, /*trained=*/false)),
        storage(state.table) {
    load_hf_weights(folder, config, state, storage);
  }
  static ModelConfig with_mtp(ModelConfig config, int32_t layers) {
    config.mtp_num_layers = layers;
    return config;
  }
  ModelConfig config;
  ModelState state;
  StateStorage storage;
};

void expect_same_weights(const Model35& a, const Model35& b) {
  ASSERT_EQ(a.state.parameters.size(), b.state.parameters.size());
  for (size_t i = 0; i < a.state.parameters.size(); ++i) {
    const TensorView left = a.storage.view(a.state.parameters[i].value);
    const TensorView right = b.storage.view(b.state.parameters[i].value);
    ASSERT_EQ(left.shape, right.shape) << a.state.parameters[i].full_name();
    EXPECT_EQ(std::memcmp(left.data, right.data,
                          static_cast<size_t>(left.shape.elements()) * sizeof(float)),
              0)
        << a.state.parameters[i].full_name();
  }
}

// The tensors of a folder of one file, as their specifications and bytes.
struct Tensor35 {
  FileDType dtype = FileDType::f32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};
using Tensors35 = std::map<std::string, Tensor35>;

Tensors35 read_tensors(const std::string& folder) {
  Tensors35 tensors;
  const SafetensorsFolder open = SafetensorsFolder::open(folder);
  for (const SafetensorsFile& file : open.files()) {
    for (const TensorEntry& entry : file.entries()) {
      const auto bytes = file.bytes(entry);
      tensors[entry.name] = {entry.dtype, entry.shape, {bytes.begin(), bytes.end()}};
    }
  }
  return tensors;
}

void write_tensors(const std::string& folder, const Tensors35& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.dtype, tensor.shape});
  const Disk disk;
  SafetensorsWriter writer(disk, folder + "/model.safetensors", specs);
  size_t number = 0;
  for (const auto& [name, tensor] : tensors) writer.append(number++, tensor.bytes);
  writer.finish();
}

// The experts of each layer in two tensors, as the published folders have them.
Tensors35 with_experts_together(const Tensors35& tensors) {
  Tensors35 result;
  for (const auto& [name, tensor] : tensors) {
    const size_t at = name.find(".experts.");
    if (at == std::string::npos) {
      result[name] = tensor;
      continue;
    }
    const std::string prefix = name.substr(0, at + 9);
    const auto add = [&](const std::string& together, const std::vector<std::string>& parts) {
      Tensor35& whole = result[prefix + together];
      if (!whole.shape.empty()) return;
      int64_t experts = 0;
      for (; tensors.contains(prefix + std::to_string(experts) + "." + parts[0]); ++experts) {
        for (const std::string& part : parts) {
          const Tensor35& own = tensors.at(prefix + std::to_string(experts) + "." + part);
          whole.bytes.insert(whole.bytes.end(), own.bytes.begin(), own.bytes.end());
        }
      }
      const auto rows = static_cast<int64_t>(parts.size()) * tensor.shape[0];
      whole.shape = {experts, rows, tensor.shape[1]};
    };
    if (name.ends_with("down_proj.weight")) {
      add("down_proj", {"down_proj.weight"});
    } else {
      add("gate_up_proj", {"gate_proj.weight", "up_proj.weight"});
    }
  }
  return result;
}

// Beside a tower for images, as the published folders are.
Tensors35 in_language_model(const Tensors35& tensors) {
  Tensors35 result;
  for (const auto& [name, tensor] : tensors) {
    const bool of_model = name.starts_with("model.");
    result[of_model ? "model.language_model." + name.substr(6) : name] = tensor;
  }
  result["model.visual.pos_embed.weight"] = {FileDType::f32, {1, 1}, std::vector<std::byte>(4)};
  return result;
}

json seeing(const json& text) {
  json inner = text;
  inner.erase("architectures");
  json whole = {{"architectures", {"Qwen3_5MoeForConditionalGeneration"}},
                {"model_type", "qwen3_5_moe"},
                {"tie_word_embeddings", false},
                {"vision_config", {{"depth", 1}, {"model_type", "qwen3_5_moe_vision"}}}};
  if (inner.contains("quantization_config")) {
    whole["quantization_config"] = inner["quantization_config"];
    inner.erase("quantization_config");
  }
  whole["text_config"] = inner;
  return whole;
}

class Qwen35 : public ::testing::TestWithParam<const char*> {
 protected:
  std::string folder_of(const std::string& name, const json& config, const Tensors35& tensors) {
    const std::string path = folder / name;
    std::filesystem::create_directories(path);
    put_file(path + "/config.json", config.dump());
    write_tensors(path, tensors);
    return path;
  }
  json config() const { return json::parse(get_file(reference(GetParam()) + "/config.json")); }
  TempFolder folder;
};

// The same model under Qwen3-Next's names.
TEST_P(Qwen35, IsQwen3NextUnderOtherNames) {
  const Model35 own(reference(GetParam()));
  ModelConfig next = own.config;
  next.hf_architecture = "Qwen3NextForCausalLM";
  save_hf_model(folder / "next", next, own.state, elements_in(own.storage), kWholeFile);
  const Tensors35 written = read_tensors(folder / "next");
  const Model35 again(folder / "next");
  EXPECT_EQ(again.config.hf_architecture, next.hf_architecture);
  expect_same_weights(again, own);

  // Row by row, as the two models of transformers read them: q, k, v and z of a key head there.
  const Tensors35 apart = read_tensors(reference(GetParam()));
  const int32_t layer = own.config.has_linear_attention(0) ? 0 : 1;
  const std::string at = "model.layers." + std::to_string(layer) + ".linear_attn.";
  const int64_t keys = own.config.linear_num_key_heads;
  const int64_t shared = own.config.linear_num_value_heads / keys;
  const int64_t key = own.config.linear_key_head_dim;
  const int64_t value = shared * own.config.linear_value_head_dim;
  const auto expect_row = [&](const std::string& fused, int64_t row, const std::string& name,
                              int64_t other) {
    const size_t bytes = static_cast<size_t>(own.config.hidden_size) * sizeof(float);
    const auto row_of = [&](const Tensors35& tensors, const std::string& tensor, int64_t number) {
      return tensors.at(at + tensor + ".weight").bytes.data() + static_cast<size_t>(number) * bytes;
    };
    EXPECT_EQ(std::memcmp(row_of(written, fused, row), row_of(apart, name, other), bytes), 0)
        << fused << " row " << row << ", " << name << " row " << other;
  };
  for (int64_t head = 0; head < keys; ++head) {
    const int64_t first = head * (2 * key + 2 * value);
    for (int64_t i = 0; i < key; ++i) {
      expect_row("in_proj_qkvz", first + i, "in_proj_qkv", head * key + i);
      expect_row("in_proj_qkvz", first + key + i, "in_proj_qkv", (keys + head) * key + i);
    }
    for (int64_t i = 0; i < value; ++i) {
      expect_row("in_proj_qkvz", first + 2 * key + i, "in_proj_qkv",
                 2 * keys * key + head * value + i);
      expect_row("in_proj_qkvz", first + 2 * key + value + i, "in_proj_z", head * value + i);
    }
    for (int64_t i = 0; i < shared; ++i) {
      expect_row("in_proj_ba", head * 2 * shared + i, "in_proj_b", head * shared + i);
      expect_row("in_proj_ba", head * 2 * shared + shared + i, "in_proj_a", head * shared + i);
    }
  }
}

// Whatever the form of the folder, the weights are the same bits, and leave in one form.
TEST_P(Qwen35, EveryFormOfAFolderLoads) {
  const Model35 own(reference(GetParam()));
  const Tensors35 tensors = read_tensors(reference(GetParam()));
  const Tensors35 together = with_experts_together(tensors);
  ASSERT_LT(together.size(), tensors.size());
  const std::map<std::string, std::string> forms = {
      {"together", folder_of("together", config(), together)},
      {"seeing", folder_of("seeing", seeing(config()), in_language_model(tensors))},
      {"published", folder_of("published", seeing(config()), in_language_model(together))}};
  for (const auto& [name, path] : forms) {
    SCOPED_TRACE(name);
    EXPECT_EQ(hf_also_sees(path + "/config.json"), name != "together");
    const Model35 read(path);
    EXPECT_EQ(read.config, own.config);
    expect_same_weights(read, own);
    save_hf_model(
        folder / (name + "_out"), read.config, read.state, elements_in(read.storage), kWholeFile,
        {.config_json = write_hf_config(read.config, {.text = get_file(path + "/config.json"),
                                                      .where = "config.json",
                                                      .has_weights = true})});
    EXPECT_EQ(read_tensors(folder / (name + "_out")).size(), tensors.size());
    const Model35 again(folder / (name + "_out"));
    EXPECT_EQ(again.config, own.config);
    expect_same_weights(again, own);
  }
}

// Codes and scales come back from there, too.
TEST_P(Qwen35, EightBitsComeBackFromEveryForm) {
  const Model35 own(reference(GetParam()));
  const auto export_of = [&](const HfConfigSource& source, const std::string& scales) {
    HfConfigSource from = source;
    from.quantization_config = hf_quantization_config(own.config, HfQuantization::fp8_block);
    return HfExport{.config_json = write_hf_config(own.config, from),
                    .dtype = FileDType::bf16,
                    .quantization = HfQuantization::fp8_block,
                    .scales_from = scales};
  };
  save_hf_model(folder / "text", own.config, own.state, elements_in(own.storage), kWholeFile,
                export_of({}, ""));
  const Tensors35 tensors = read_tensors(folder / "text");
  const json text = json::parse(get_file(folder / "text/config.json"));
  const std::string path = folder_of("seeing", seeing(text), in_language_model(tensors));
  EXPECT_EQ(hf_folder_quantization(path), HfQuantization::fp8_block);
  const Model35 read(path);
  expect_same_weights(read, Model35(folder / "text"));
  const HfConfigSource source{
      .text = get_file(path + "/config.json"), .where = "config.json", .has_weights = true};
  save_hf_model(folder / "again", read.config, read.state, elements_in(read.storage), kWholeFile,
                export_of(source, path));
  EXPECT_EQ(get_file(folder / "again/model.safetensors"),
            get_file(folder / "text/model.safetensors"));
}

// Layers of multi-token prediction have names of their own in every form.
TEST_P(Qwen35, LayersOfMultiTokenPredictionLoadInEveryForm) {
  ModelConfig wanted = read_hf_config(reference(GetParam()) + "/config.json");
  wanted.mtp_num_layers = 1;
  const ModelState state = declare_model_state(wanted, DType::f32, /*trained=*/false);
  const StateStorage storage(state.table);
  number_elements(state, storage);
  save_hf_model(folder / "mtp", wanted, state, elements_in(storage), kWholeFile);
  const json text = json::parse(get_file(folder / "mtp/config.json"));
  EXPECT_EQ(text.at("mtp_num_hidden_layers"), 1);
  const Tensors35 tensors = read_tensors(folder / "mtp");
  EXPECT_TRUE(tensors.contains("mtp.layers.0.mlp.experts.0.gate_proj.weight"));
  const Tensors35 together = with_experts_together(tensors);
  EXPECT_TRUE(together.contains("mtp.layers.0.mlp.experts.gate_up_proj"));
  const std::string path = folder_of("published", seeing(text), in_language_model(together));
  EXPECT_EQ(find_hf_prediction_layers(path).readable(), 1);
  expect_same_weights(Model35(path, 1), Model35(folder / "mtp", 1));
  // And without them: what is left out does not change the text that says so.
  json none = config();
  none["mtp_num_hidden_layers"] = 0;
  put_file(path + "/config.json", seeing(none).dump());
  EXPECT_EQ(find_hf_prediction_layers(path).held, 0);
}

INSTANTIATE_TEST_SUITE_P(References, Qwen35, ::testing::Values("qwen3_5_moe", "qwen3_5_moe_odd"),
                         [](const auto& info) { return std::string(info.param); });

class Qwen35Config : public ::testing::Test {
 protected:
  json text = json::parse(get_file(reference("qwen3_5_moe_odd") + "/config.json"));
  static ModelConfig parse(const json& config) {
    return parse_hf_config(config.dump(), "config.json");
  }
  static std::string refusal(const json& config) {
    return message_of(ExitStatus::bad_request, [&] { parse(config); });
  }
};

TEST_F(Qwen35Config, SaysTheModel) {
  const ModelConfig config = parse(text);
  EXPECT_EQ(config.hf_architecture, "Qwen3_5MoeForCausalLM");
  EXPECT_EQ(config.linear_attention_layers, (std::vector<bool>{false, true}));
  EXPECT_EQ(config.moe_layers, (std::vector<bool>{true, true}));
  EXPECT_FALSE(config.moe_router_pre_softmax);
  EXPECT_TRUE(config.attention_output_gate);
  EXPECT_TRUE(config.zero_centered_gamma);
  EXPECT_TRUE(config.moe_shared_expert_gate);
  EXPECT_EQ(config.moe_shared_expert_intermediate_size, 28);
  EXPECT_EQ(config.linear_num_value_heads, 6);
  // transformers takes it from rope_parameters, where both say it.
  EXPECT_EQ(text["partial_rotary_factor"], 0.25);
  EXPECT_EQ(config.rotary_percent, 0.5);
}

// Those of the class in transformers.
TEST_F(Qwen35Config, MissingFieldsHaveDefaults) {
  for (const char* name : {"head_dim", "linear_key_head_dim", "linear_value_head_dim",
                           "linear_num_key_heads", "linear_num_value_heads", "layer_types",
                           "linear_conv_kernel_dim", "shared_expert_intermediate_size",
                           "rope_parameters", "partial_rotary_factor", "num_key_value_heads"}) {
    text.erase(name);
  }
  const ModelConfig config = parse(text);
  EXPECT_EQ(config.kv_channels, 256);
  EXPECT_EQ(config.linear_key_head_dim, 128);
  EXPECT_EQ(config.linear_value_head_dim, 128);
  EXPECT_EQ(config.linear_num_key_heads, 16);
  EXPECT_EQ(config.linear_num_value_heads, 32);
  EXPECT_EQ(config.linear_conv_kernel_dim, 4);
  EXPECT_EQ(config.moe_shared_expert_intermediate_size, 512);
  EXPECT_EQ(config.rotary_base, 10000);
  EXPECT_EQ(config.rotary_percent, 0.25);
  EXPECT_EQ(config.num_query_groups, 2);
  EXPECT_EQ(config.linear_attention_layers, (std::vector<bool>{true, true}));
}

TEST_F(Qwen35Config, ComesBack) {
  for (const json& form : {text, seeing(text)}) {
    const ModelConfig config = parse(form);
    EXPECT_EQ(config, parse(text));
    EXPECT_EQ(parse_hf_config(write_hf_config(config), "written"), config);
    const HfConfigSource source{
        .text = " " + form.dump(), .where = "config.json", .has_weights = true};
    const std::string written = write_hf_config(config, source);
    EXPECT_EQ(parse_hf_config(written, "written"), config);
    // What stands alone stays to the byte; of what sees the text model is written.
    EXPECT_EQ(written == source.text, form == text);
    EXPECT_EQ(json::parse(written).at("model_type"), "qwen3_5_moe_text");
    EXPECT_FALSE(json::parse(written).contains("vision_config"));
  }
}

TEST_F(Qwen35Config, RefusesWhatIsNotComputed) {
  json config = text;
  config["attention_bias"] = true;
  expect_phrase(refusal(config), "\"attention_bias\": true is not supported.");
  config = text;
  config["layer_types"][1] = "sliding_attention";
  expect_phrase(refusal(config), "\"linear_attention\" and \"full_attention\"");
  config = text;
  config["layer_types"].erase(0);
  expect_phrase(refusal(config), "an entry for each layer");
  config = text;
  config.erase("moe_intermediate_size");
  expect_phrase(refusal(config), "the field \"moe_intermediate_size\" is missing.");
  config = seeing(text);
  config["text_config"] = 1;
  expect_phrase(refusal(config), "config.json: the field \"text_config\" must be an object.");
  // A dense layer has no place in this architecture.
  ModelConfig mixed = parse(text);
  mixed.moe_layers[0] = false;
  mixed.ffn_hidden_size = 32;
  expect_phrase(why_no_hf_form(mixed), "moe_layers");
}

class Qwen35Refusal : public Qwen35 {};

TEST_P(Qwen35Refusal, NamesTheTensor) {
  const Tensors35 tensors = read_tensors(reference(GetParam()));
  const std::string name = "model.layers.1.linear_attn.in_proj_z.weight";
  Tensors35 changed = tensors;
  changed.erase(name);
  expect_phrase(message_of(ExitStatus::bad_request,
                           [&] { Model35(folder_of("missing", config(), changed)); }),
                "the tensor " + name + " is missing.");
  changed = tensors;
  changed.at(name).shape[0] /= 2;
  changed.at(name).bytes.resize(changed.at(name).bytes.size() / 2);
  expect_phrase(
      message_of(ExitStatus::bad_request, [&] { Model35(folder_of("half", config(), changed)); }),
      "the configuration needs [72, 40]");
  // In the order of the file, whatever that of the parameter is.
  changed = tensors;
  const float infinite = std::numeric_limits<float>::infinity();
  const size_t element = 13 * 40 + 7;
  std::memcpy(changed.at(name).bytes.data() + element * sizeof(float), &infinite, sizeof infinite);
  expect_phrase(
      message_of(ExitStatus::failed, [&] { Model35(folder_of("infinite", config(), changed)); }),
      "the tensor " + name + " is not finite as f32 at element 527 of 2880");
  // What sees has a place only where the text model has its place beside it.
  changed = tensors;
  changed["model.visual.pos_embed.weight"] = {FileDType::f32, {1, 1}, std::vector<std::byte>(4)};
  expect_phrase(
      message_of(ExitStatus::bad_request, [&] { Model35(folder_of("odd", config(), changed)); }),
      "the tensor model.visual.pos_embed.weight has no place");
  // Fused projections are Qwen3-Next's.
  changed = tensors;
  changed["model.layers.1.linear_attn.in_proj_qkvz.weight"] = tensors.at(name);
  expect_phrase(
      message_of(ExitStatus::bad_request, [&] { Model35(folder_of("fused", config(), changed)); }),
      "in_proj_qkvz.weight has no place in a Qwen3_5MoeForCausalLM");
}

INSTANTIATE_TEST_SUITE_P(References, Qwen35Refusal, ::testing::Values("qwen3_5_moe_odd"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace qwen35
}  // namespace troupe
