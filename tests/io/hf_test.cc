// Hugging Face configurations and weights: both dialects, what is refused and by which name, and
// bytes that come back as they went in.
#include <algorithm>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "io/convert_dtype.h"
#include "io/file.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "io/io_test_support.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace troupe {
namespace {

using namespace io_test;
using nlohmann::json;

// A small Qwen3-MoE model as transformers 5 writes it.
json qwen3_moe() {
  return json::parse(R"({
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "decoder_sparse_step": 2, "dtype": "float32", "head_dim": 24, "hidden_act": "silu",
    "hidden_size": 48, "initializer_range": 0.03, "intermediate_size": 72,
    "max_position_embeddings": 128, "mlp_only_layers": [3], "model_type": "qwen3_moe",
    "moe_intermediate_size": 24, "norm_topk_prob": false, "num_attention_heads": 4,
    "num_experts_per_tok": 4, "num_hidden_layers": 6, "num_key_value_heads": 2,
    "num_local_experts": 12, "rms_norm_eps": 2e-06,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "router_aux_loss_coef": 0.002, "sliding_window": null, "tie_word_embeddings": true,
    "use_sliding_window": false, "vocab_size": 160})");
}

json mixtral() {
  return json::parse(R"({
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "dtype": "float32",
    "head_dim": null, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02,
    "intermediate_size": 72, "max_position_embeddings": 128, "model_type": "mixtral",
    "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "sliding_window": 7,
    "tie_word_embeddings": false, "vocab_size": 160})");
}

json dense(const char* architecture) {
  json config = mixtral();
  config["architectures"] = {architecture};
  for (const char* name : {"num_experts_per_tok", "num_local_experts", "router_aux_loss_coef",
                           "router_jitter_noise", "sliding_window"}) {
    config.erase(name);
  }
  return config;
}

// The same configuration in the older dialect of most files on the hub.
json in_older_dialect(json config) {
  config["rope_theta"] = config["rope_parameters"]["rope_theta"];
  config["rope_scaling"] = nullptr;
  config["torch_dtype"] = config["dtype"];
  config.erase("rope_parameters");
  config.erase("dtype");
  if (config["architectures"][0] == "Qwen3MoeForCausalLM") {
    config["num_experts"] = config["num_local_experts"];
    config.erase("num_local_experts");
  }
  return config;
}

ModelConfig parse(const json& config) {
  return parse_hf_config(config.dump(), "folder/config.json");
}

TEST(HfConfig, Qwen3Moe) {
  const ModelConfig config = parse(qwen3_moe());
  EXPECT_EQ(config.hf_architecture, "Qwen3MoeForCausalLM");
  EXPECT_EQ(config.vocab_size, 160);
  EXPECT_EQ(config.hidden_size, 48);
  EXPECT_EQ(config.num_layers, 6);
  EXPECT_EQ(config.num_attention_heads, 4);
  EXPECT_EQ(config.num_query_groups, 2);
  EXPECT_EQ(config.kv_channels, 24);
  EXPECT_TRUE(config.qk_layernorm);
  EXPECT_EQ(config.sliding_window, 0);
  EXPECT_EQ(config.rotary_base, 500000.0);
  EXPECT_EQ(config.max_position_embeddings, 128);
  EXPECT_EQ(config.ffn_hidden_size, 72);
  EXPECT_EQ(config.norm_epsilon, 2e-6);
  EXPECT_TRUE(config.tie_embeddings);
  EXPECT_EQ(config.num_experts, 12);
  EXPECT_EQ(config.moe_router_topk, 4);
  EXPECT_EQ(config.moe_ffn_hidden_size, 24);
  EXPECT_TRUE(config.moe_router_pre_softmax);
  // Every second layer has experts, and layer 3 is dense nonetheless.
  EXPECT_EQ(config.moe_layers, (std::vector<bool>{false, true, false, false, false, true}));
  EXPECT_EQ(config.moe_aux_loss_coeff, 0.002);
  EXPECT_EQ(config.moe_z_loss_coeff, 0);
  EXPECT_EQ(config.init_method_std, 0.03);
}

TEST(HfConfig, Mixtral) {
  const ModelConfig config = parse(mixtral());
  EXPECT_EQ(config.kv_channels, 12) << "hidden size over heads";
  EXPECT_FALSE(config.qk_layernorm);
  EXPECT_FALSE(config.moe_router_pre_softmax);
  EXPECT_EQ(config.moe_ffn_hidden_size, 72);
  EXPECT_EQ(config.num_experts, 4);
  EXPECT_EQ(config.sliding_window, 7);
  EXPECT_EQ(config.moe_layers, (std::vector<bool>{true, true}));
}

// As the model is published: what turns of a head is a number of elements.
json minimax_m2() {
  return json::parse(R"({
    "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1, 1],
    "head_dim": 16, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02,
    "intermediate_size": 24, "layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 128, "mlp_intermediate_size": 96, "model_type": "minimax_m2",
    "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_mtp_modules": 3,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 8,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "sliding_window": null, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "use_qk_norm": true, "use_routing_bias": true,
    "vocab_size": 160})");
}

TEST(HfConfig, MiniMaxM2) {
  json document = minimax_m2();
  const ModelConfig config = parse(document);
  EXPECT_EQ(config.rotary_percent, 0.5);
  EXPECT_EQ(config.rotary_dim(), 8);
  EXPECT_TRUE(config.qk_layernorm);
  EXPECT_EQ(config.qk_norm_scope, QkNormScope::projection);
  EXPECT_EQ(config.moe_ffn_hidden_size, 24);
  EXPECT_EQ(config.moe_layers, (std::vector<bool>{true, true}));
  EXPECT_EQ(config.moe_router_score_function, ScoreFunction::sigmoid);
  EXPECT_TRUE(config.moe_router_enable_expert_bias);
  EXPECT_TRUE(config.moe_router_normalize_scores);
  EXPECT_EQ(config.moe_router_num_groups, 0);
  EXPECT_FALSE(config.has_shared_expert());
  // As transformers writes it, the part is in rope_parameters.
  document.erase("rotary_dim");
  document["rope_parameters"] = {
      {"partial_rotary_factor", 0.5}, {"rope_theta", 5000000.0}, {"rope_type", "default"}};
  EXPECT_EQ(parse(document), config);
  document["rope_parameters"].erase("partial_rotary_factor");
  EXPECT_EQ(parse(document).rotary_dim(), 16) << "all of the head turns";
}

// As transformers takes it: where both places say which part of a head turns, rope_parameters.
TEST(HfConfig, RopeParametersSayWhatTurns) {
  json document = json::parse(get_file(TROUPE_FIXTURE_DIR "/hf/glm4moe/config.json"));
  document["partial_rotary_factor"] = 0.5;
  document["rope_parameters"]["partial_rotary_factor"] = 0.25;
  EXPECT_EQ(parse(document).rotary_percent, 0.25);
  document["rope_parameters"].erase("partial_rotary_factor");
  EXPECT_EQ(parse(document).rotary_percent, 0.5);
}

TEST(HfConfig, Ling2) {
  json document = json::parse(get_file(TROUPE_FIXTURE_DIR "/hf/ling_v2/config.json"));
  const ModelConfig config = parse(document);
  EXPECT_EQ(config.rotary_dim(), 8);
  EXPECT_EQ(config.qk_norm_scope, QkNormScope::head);
  EXPECT_EQ(config.moe_layers, (std::vector<bool>{false, true, true}));
  EXPECT_EQ(config.moe_router_num_groups, 4);
  EXPECT_EQ(config.moe_router_group_topk, 2);
  EXPECT_EQ(config.moe_router_topk_scaling_factor, 2.5);
  EXPECT_EQ(config.moe_shared_expert_intermediate_size, 24);
  document["num_shared_experts"] = nullptr;  // not the default of a field that is missing
  EXPECT_FALSE(parse(document).has_shared_expert());
  for (const char* name : {"head_dim", "num_shared_experts", "use_qk_norm", "n_group", "topk_group",
                           "rope_theta", "first_k_dense_replace"}) {
    document.erase(name);
  }
  document["num_experts"] = 16;
  document["num_experts_per_tok"] = 4;
  const ModelConfig published = parse(document);
  EXPECT_EQ(published.kv_channels, 128);
  EXPECT_TRUE(published.qk_layernorm);
  EXPECT_EQ(published.moe_router_num_groups, 8);
  EXPECT_EQ(published.rotary_base, 600000);
  EXPECT_EQ(published.moe_layers, (std::vector<bool>{false, true, true}));
}

TEST(HfConfig, DenseModels) {
  const ModelConfig llama = parse(dense("LlamaForCausalLM"));
  EXPECT_EQ(llama.num_experts, 0);
  EXPECT_EQ(llama.ffn_hidden_size, 72);
  EXPECT_FALSE(llama.qk_layernorm);
  EXPECT_TRUE(parse(dense("Qwen3ForCausalLM")).qk_layernorm);
}

TEST(HfConfig, SlidingWindowOfQwen3CountsOnlyWhenUsed) {
  json config = qwen3_moe();
  config["sliding_window"] = 32;
  EXPECT_EQ(parse(config).sliding_window, 0);
  config["use_sliding_window"] = true;
  EXPECT_EQ(parse(config).sliding_window, 32);
}

TEST(HfConfig, DialectsSayTheSame) {
  for (const json& config :
       {qwen3_moe(), mixtral(), dense("LlamaForCausalLM"), dense("Qwen3ForCausalLM")}) {
    EXPECT_EQ(parse(config), parse(in_older_dialect(config))) << config["architectures"];
  }
}

TEST(HfConfig, DefaultsOfAbsentFields) {
  json config = mixtral();
  for (const char* name : {"sliding_window", "tie_word_embeddings", "router_aux_loss_coef"}) {
    config.erase(name);
  }
  const ModelConfig parsed = parse(config);
  EXPECT_EQ(parsed.sliding_window, 0);
  EXPECT_FALSE(parsed.tie_embeddings);
  EXPECT_EQ(parsed.moe_aux_loss_coeff, 0);
}

TEST(HfConfig, WrittenAndReadBack) {
  json windowed = qwen3_moe();
  windowed["use_sliding_window"] = true;
  windowed["sliding_window"] = 16;
  windowed["norm_topk_prob"] = true;
  json all_experts = qwen3_moe();
  all_experts["decoder_sparse_step"] = 1;
  all_experts["mlp_only_layers"] = json::array();
  for (const json& config : {qwen3_moe(), windowed, all_experts, mixtral(),
                             dense("LlamaForCausalLM"), dense("Qwen3ForCausalLM")}) {
    const ModelConfig parsed = parse(config);
    EXPECT_EQ(parse_hf_config(write_hf_config(parsed), "written"), parsed) << config;
  }
}

json written(const json& config, const HfConfigSource& source) {
  return json::parse(write_hf_config(parse(config), source));
}

// Readers differ in the names that they look for, and take a default where they find none.
TEST(HfConfig, AModelOfOurOwnIsWrittenInEverySpelling) {
  const HfConfigSource own{.tokens = HfTokenIds{.bos = {}, .eos = 5}, .dtype = "bfloat16"};
  for (const json& config : {qwen3_moe(), in_older_dialect(qwen3_moe()), mixtral()}) {
    HfConfigSource with_text = own;
    with_text.text = config.dump();
    for (const HfConfigSource& source : {own, with_text}) {
      const json document = written(config, source);
      EXPECT_EQ(document["num_experts"], parse(config).num_experts);
      EXPECT_EQ(document["num_local_experts"], parse(config).num_experts);
      EXPECT_EQ(document["rope_theta"], parse(config).rotary_base);
      EXPECT_EQ(document["rope_parameters"]["rope_theta"], parse(config).rotary_base);
      EXPECT_EQ(document["dtype"], "bfloat16");
      EXPECT_EQ(document["torch_dtype"], "bfloat16");
      EXPECT_EQ(document["eos_token_id"], 5);
      EXPECT_TRUE(document["bos_token_id"].is_null());
      EXPECT_TRUE(document["use_cache"]);
    }
  }
}

// Of a model that came from a folder, what has not changed stays, to the byte.
TEST(HfConfig, ASourceIsChangedOnlyWhereTheModelIs) {
  for (json config : {qwen3_moe(), in_older_dialect(qwen3_moe()), mixtral()}) {
    config["max_window_layers"] = 3;
    config["eos_token_id"] = {1, 2};
    const HfConfigSource source{.text = " " + config.dump() + "\n", .has_weights = true};
    EXPECT_EQ(write_hf_config(parse(config), source), source.text);

    ModelConfig changed = parse(config);
    changed.rotary_base = 7e5;
    changed.num_experts += 1;
    json wanted = config;
    for (const char* name : {"num_experts", "num_local_experts"}) {
      if (config.contains(name)) wanted[name] = changed.num_experts;
    }
    if (config.contains("rope_theta")) wanted["rope_theta"] = 7e5;
    if (config.contains("rope_parameters")) wanted["rope_parameters"]["rope_theta"] = 7e5;
    EXPECT_EQ(json::parse(write_hf_config(changed, source)), wanted);
  }
}

// A list with an entry for each layer stays where it fits, and goes where it does not.
TEST(HfConfig, AListOfLayersStaysWhereItFits) {
  json config = dense("Qwen3ForCausalLM");
  config["layer_types"] = {"full_attention", "full_attention"};
  const HfConfigSource source{.text = config.dump()};
  EXPECT_EQ(written(config, source)["layer_types"], config["layer_types"]);
  ModelConfig deeper = parse(config);
  deeper.num_layers = 3;
  EXPECT_FALSE(json::parse(write_hf_config(deeper, source)).contains("layer_types"));
  const HfConfigSource with_weights{.text = config.dump(), .has_weights = true};
  EXPECT_FALSE(json::parse(write_hf_config(deeper, with_weights)).contains("layer_types"));
  ModelConfig wider = parse(config);
  wider.ffn_hidden_size += 8;
  EXPECT_EQ(json::parse(write_hf_config(wider, with_weights))["layer_types"],
            config["layer_types"]);
}

// A model that goes on without the prediction layers of its source does not state them.
TEST(HfConfig, ASourcesPredictionLayersAreStatedWhereTheModelHasThem) {
  json config = json::parse(get_file(TROUPE_FIXTURE_DIR "/hf/deepseek_v3/config.json"));
  config["num_nextn_predict_layers"] = 1;
  const HfConfigSource source{.text = config.dump(), .has_weights = true};
  ModelConfig model = parse(config);
  model.mtp_num_layers = 0;
  EXPECT_EQ(json::parse(write_hf_config(model, source))["num_nextn_predict_layers"], 0);
  model.mtp_num_layers = 1;
  EXPECT_EQ(write_hf_config(model, source), source.text);
}

// DeepSeek's indexer norms its keys with 1e-6, whatever "rms_norm_eps" is.
TEST(HfConfig, TheIndexersNormHasAnEpsilonOfItsOwn) {
  json config = json::parse(get_file(TROUPE_FIXTURE_DIR "/hf/deepseek_v32/config.json"));
  ASSERT_EQ(config["rms_norm_eps"], 1e-6);
  EXPECT_EQ(parse(config).dsa_indexer_k_norm_epsilon, 0) << "0: that of the other norms";
  config["rms_norm_eps"] = 1e-5;
  EXPECT_EQ(parse(config).norm_epsilon, 1e-5);
  EXPECT_EQ(parse(config).dsa_indexer_k_norm_epsilon, 1e-6);
}

// A field that is left out may follow from one that has changed.
TEST(HfConfig, AChangeThatASourceImpliesOtherwiseIsWritten) {
  json config = mixtral();
  config.erase("head_dim");
  ModelConfig changed = parse(config);
  changed.hidden_size *= 2;  // the heads stay as wide as they were
  const HfConfigSource source{.text = config.dump(), .has_weights = true};
  EXPECT_EQ(parse_hf_config(write_hf_config(changed, source), "written"), changed);
  changed = parse(qwen3_moe());
  changed.moe_layers = {true, false, true, true, true, false};
  EXPECT_EQ(
      parse_hf_config(write_hf_config(changed, {.text = qwen3_moe().dump(), .has_weights = true}),
                      "written"),
      changed);
}

TEST(HfConfig, AModelThatItCannotDescribeIsNotWritten) {
  ModelConfig config = parse(mixtral());
  config.qk_layernorm = true;
  const std::string message = message_of(ExitStatus::bad_request, [&] { write_hf_config(config); });
  expect_phrase(message, "MixtralForCausalLM");
  expect_phrase(message, "qk_layernorm = true");
}

// What flags say of experts has no effect on a model without any.
TEST(HfConfig, ADenseModelHasAnArchitectureWhateverIsSetForExperts) {
  ModelConfig config = parse(dense("LlamaForCausalLM"));
  config.moe_router_topk = 2;
  config.moe_ffn_hidden_size = 8;
  config.moe_router_score_function = ScoreFunction::sigmoid;
  config.moe_router_pre_softmax = !config.moe_router_pre_softmax;
  config.moe_router_topk_scaling_factor = 2.5;
  config.moe_router_enable_expert_bias = true;
  config.moe_router_bias_update_rate = 0.5;
  config.moe_router_num_groups = 2;
  config.moe_router_group_topk = 1;
  config.moe_router_sinkhorn = true;
  config.moe_shared_expert_intermediate_size = 8;
  config.moe_shared_expert_gate = true;
  config.moe_layers = {true, false};
  config.moe_aux_loss_coeff = 0.5;
  EXPECT_EQ(fitting_hf_architecture(config), "LlamaForCausalLM");
}

// What has no effect on the weights, or on what a trained model computes, is no reason either.
TEST(HfConfig, WhatTrainingAloneUsesHasNoArchitecture) {
  ModelConfig config = parse(mixtral());
  config.hidden_dropout = config.attention_dropout = 0.1;
  config.moe_seq_aux_loss_coeff = config.moe_global_aux_loss_coeff = config.moe_z_loss_coeff = 0.5;
  config.moe_input_jitter_eps = 0.01;
  config.moe_router_force_load_balancing = true;
  config.moe_router_fp64 = true;
  config.moe_expert_capacity_factor = 1.25;
  config.moe_token_drop_policy = DropPolicy::position;
  config.moe_pad_expert_input_to_capacity = true;
  config.moe_expert_row_multiple = 16;
  config.embedding_init_method_std = 0.5;
  config.init_method_xavier_uniform = true;
  config.mtp_loss_scaling_factor = 0.2;
  config.mtp_use_repeated_layer = true;
  config.dsa_indexer_loss_coeff = 0.5;
  config.dsa_indexer_use_sparse_loss = true;
  config.moe_router_force_biased = 0.5;
  config.moe_router_bias_update_rate = 0.5;  // without such biases
  config.ffn_hidden_size = 64;               // without dense layers
  EXPECT_EQ(fitting_hf_architecture(config), "MixtralForCausalLM");
}

TEST(HfConfig, HowFastExpertBiasesMoveHasNoPlace) {
  for (const char* name : {"deepseek_v3", "deepseek_v32", "glm4moe", "minimax_m2", "ling_v2"}) {
    SCOPED_TRACE(name);
    const std::string text =
        get_file(std::string(TROUPE_FIXTURE_DIR "/hf/") + name + "/config.json");
    ModelConfig config = parse_hf_config(text, name);
    ASSERT_TRUE(config.moe_router_enable_expert_bias);
    const HfConfigSource source{.text = text, .where = name, .has_weights = true};
    const std::string written = write_hf_config(config, source);
    for (const double rate : {0.0, 0.25}) {
      config.moe_router_bias_update_rate = rate;
      EXPECT_EQ(why_no_hf_form(config), "");
      EXPECT_EQ(fitting_hf_architecture(config), config.hf_architecture);
      EXPECT_EQ(write_hf_config(config, source), written);
    }
  }
}

// Whatever no architecture has is named, and no file is begun.
TEST(HfConfig, WhatNoArchitectureHasIsNamed) {
  const auto expect_named = [](const char* field, const auto& change) {
    ModelConfig config = parse(mixtral());
    change(config);
    config.validate();
    EXPECT_EQ(fitting_hf_architecture(config), "") << field;
    config.hf_architecture.clear();
    const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
    const StateStorage storage(state.table);
    const TempFolder folder;
    const std::string message = message_of(ExitStatus::bad_request, [&] {
      save_hf_model(folder / "model", config, state, elements_in(storage),
                    /*max_shard_bytes=*/1 << 20);
    });
    expect_phrase(message, field);
    EXPECT_FALSE(path_exists(folder / "model")) << field;
  };
  // The nearest has the router, but no window.
  expect_named("sliding_window = 7", [](ModelConfig& config) {
    config.moe_router_score_function = ScoreFunction::sigmoid;
    config.moe_router_enable_expert_bias = true;
    config.sliding_window = 7;
  });
  expect_named("moe_router_score_function = \"sigmoid\"", [](ModelConfig& config) {
    config.moe_router_score_function = ScoreFunction::sigmoid;
  });
  expect_named("moe_router_sinkhorn = true", [](ModelConfig& config) {
    config.moe_router_sinkhorn = true;
    config.moe_router_topk = 1;
    config.moe_aux_loss_coeff = 0;
  });
  expect_named("moe_router_num_groups = 2", [](ModelConfig& config) {
    config.moe_router_num_groups = 2;
    config.moe_router_group_topk = 1;
  });
  expect_named("moe_router_topk_scaling_factor = 2.5",
               [](ModelConfig& config) { config.moe_router_topk_scaling_factor = 2.5; });
  expect_named("zero_centered_gamma = true",
               [](ModelConfig& config) { config.zero_centered_gamma = true; });
  expect_named("normalization = \"LayerNorm\"",
               [](ModelConfig& config) { config.normalization = Normalization::layer_norm; });
  expect_named("add_bias_linear = true",
               [](ModelConfig& config) { config.add_bias_linear = true; });
  expect_named("activation = \"gelu\"",
               [](ModelConfig& config) { config.activation = ActivationFunction::gelu; });
  // Of a dense model, what it has, not that it has no experts.
  expect_named("normalization = \"LayerNorm\"", [](ModelConfig& config) {
    config.num_experts = 0;
    config.moe_layers.clear();
    config.ffn_hidden_size = 64;
    config.normalization = Normalization::layer_norm;
  });
  expect_named("gated_linear_unit = false",
               [](ModelConfig& config) { config.gated_linear_unit = false; });
}

// As AutoConfig.for_model of transformers 4.57 and 5.23 answers.
TEST(HfConfig, FieldsThatAreMissingHaveTheDefaultsOfTheirArchitecture) {
  const auto parsed = [](json config) {
    config["num_attention_heads"] = 64;
    config["head_dim"] = 8;
    for (const char* name : {"num_key_value_heads", "rms_norm_eps", "rope_parameters"}) {
      config.erase(name);
    }
    const ModelConfig read = parse(config);
    return std::tuple(read.num_query_groups, read.norm_epsilon, read.rotary_base);
  };
  json olmoe = mixtral();
  olmoe["architectures"] = {"OlmoeForCausalLM"};
  json qwen2_moe = qwen3_moe();
  qwen2_moe["architectures"] = {"Qwen2MoeForCausalLM"};
  qwen2_moe["shared_expert_intermediate_size"] = 24;
  EXPECT_EQ(parsed(mixtral()), std::tuple(8, 1e-5, 1e6));
  EXPECT_EQ(parsed(qwen3_moe()), std::tuple(4, 1e-6, 1e4));
  EXPECT_EQ(parsed(qwen2_moe), std::tuple(16, 1e-6, 1e4));
  EXPECT_EQ(parsed(olmoe), std::tuple(64, 1e-5, 1e4));
  EXPECT_EQ(parsed(dense("LlamaForCausalLM")), std::tuple(64, 1e-6, 1e4));
  EXPECT_EQ(parsed(dense("Qwen3ForCausalLM")), std::tuple(32, 1e-6, 1e4));

  for (const char* fixture : {"deepseek_v2", "deepseek_v3"}) {
    json latent =
        parse_json(read_file(std::string(TROUPE_FIXTURE_DIR) + "/hf/" + fixture + "/config.json",
                             uint64_t{1} << 20),
                   fixture, 8);
    for (const char* name : {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                             "qk_head_dim", "v_head_dim", "head_dim"}) {
      latent.erase(name);
    }
    const ModelConfig read = parse(latent);
    EXPECT_EQ(std::tuple(read.q_lora_rank, read.kv_lora_rank, read.qk_head_dim,
                         read.qk_pos_emb_head_dim, read.v_head_dim),
              std::tuple(1536, 512, 128, 64, 128))
        << fixture;
  }

  json nulled = mixtral();
  nulled["num_key_value_heads"] = nullptr;
  EXPECT_EQ(parse(nulled).num_query_groups, 4) << "null is as many as query heads";
}

TEST(HfConfig, PaddingToken) {
  json config = mixtral();
  EXPECT_EQ(parse(config).padding_token, -1);
  config["pad_token_id"] = 159;
  EXPECT_EQ(parse(config).padding_token, 159);
  EXPECT_EQ(parse_hf_config(write_hf_config(parse(config)), "written"), parse(config));
  config["pad_token_id"] = -1;
  EXPECT_EQ(parse(config).padding_token, 159) << "counted from the end, as PyTorch does";
  config["pad_token_id"] = nullptr;
  EXPECT_EQ(parse(config).padding_token, -1);
}

TEST(HfConfig, PaddingTokenOfOlmoe) {
  json config = mixtral();
  config["architectures"] = {"OlmoeForCausalLM"};
  config.erase("sliding_window");
  EXPECT_EQ(parse(config).padding_token, 1) << "the default of that architecture";
  config["pad_token_id"] = nullptr;
  EXPECT_EQ(parse(config).padding_token, -1);
  EXPECT_EQ(parse_hf_config(write_hf_config(parse(config)), "written"), parse(config));
}

class HfRefusal : public ::testing::Test {
 protected:
  // Refused with a message that names the file and the field.
  static void expect_refused(const json& config, const std::string& field) {
    SCOPED_TRACE(field);
    const std::string message = message_of(ExitStatus::bad_request, [&] { parse(config); });
    expect_phrase(message, field);
    expect_phrase(message, "folder/config.json");
  }
  static void expect_refused(json config, const char* name, const json& value) {
    SCOPED_TRACE(value.dump());
    config[name] = value;
    expect_refused(config, name);
  }
};

TEST_F(HfRefusal, Architectures) {
  json config = mixtral();
  config["architectures"] = {"GPT2LMHeadModel"};
  expect_refused(config, "\"GPT2LMHeadModel\" is not supported");
  expect_refused(mixtral(), "architectures", json::array());
  expect_refused(mixtral(), "architectures", {"MixtralForCausalLM", "LlamaForCausalLM"});
  expect_refused(mixtral(), "architectures", "MixtralForCausalLM");
  expect_refused(mixtral(), "architectures", {1});
  expect_refused(mixtral(), "architectures", nullptr);
}

TEST_F(HfRefusal, MissingFields) {
  for (const char* name : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                           "max_position_embeddings", "num_local_experts", "num_experts_per_tok",
                           "moe_intermediate_size", "intermediate_size"}) {
    json config = qwen3_moe();
    config.erase(name);
    expect_refused(config, name);
    config[name] = nullptr;
    expect_refused(config, name);
  }
}

TEST_F(HfRefusal, WrongTypes) {
  for (const char* name : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                           "num_key_value_heads", "head_dim", "max_position_embeddings",
                           "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
                           "intermediate_size", "decoder_sparse_step"}) {
    for (const json& value : {json("48"), json(48.5), json(true), json::array({48})}) {
      expect_refused(qwen3_moe(), name, value);
    }
  }
  for (const char* name :
       {"rms_norm_eps", "initializer_range", "router_aux_loss_coef", "attention_dropout"}) {
    expect_refused(qwen3_moe(), name, "0.1");
  }
  for (const char* name :
       {"tie_word_embeddings", "norm_topk_prob", "use_sliding_window", "attention_bias"}) {
    expect_refused(qwen3_moe(), name, 1);
  }
  expect_refused(qwen3_moe(), "hidden_act", 1);
  for (const json& token : {json("1"), json(0.5), json(160), json(-161)}) {
    expect_refused(qwen3_moe(), "pad_token_id", token);
  }
  expect_refused(qwen3_moe(), "mlp_only_layers", 3);
  expect_refused(qwen3_moe(), "mlp_only_layers", json::array({"3"}));
  expect_refused(qwen3_moe(), "rope_parameters", "default");
}

TEST_F(HfRefusal, WhatIsNotComputed) {
  expect_refused(qwen3_moe(), "hidden_act", "gelu");
  expect_refused(qwen3_moe(), "attention_bias", true);
  expect_refused(qwen3_moe(), "attention_dropout", 0.1);
  expect_refused(mixtral(), "router_jitter_noise", 0.1);
  expect_refused(dense("LlamaForCausalLM"), "mlp_bias", true);
  expect_refused(dense("Qwen3ForCausalLM"), "use_sliding_window", true);
}

// One message for all: a user who mends the first must not run into the next.
TEST_F(HfRefusal, AllReasonsAtOnce) {
  json config = qwen3_moe();
  config["rope_parameters"] = {{"rope_type", "dynamic"}, {"partial_rotary_factor", 0.5}};
  config["attention_bias"] = true;
  for (const char* architecture : {"Qwen3MoeForCausalLM", "Qwen2ForCausalLM"}) {
    config["architectures"] = {architecture};
    for (const char* reason : {"\"dynamic\"", "partial_rotary_factor", "attention_bias"}) {
      expect_refused(config, reason);
    }
  }
  expect_refused(config, "\"Qwen2ForCausalLM\" is not supported (missing: dense layers");
  config = dense("Qwen3ForCausalLM");
  config["layer_types"] = {"full_attention", "sliding_attention"};
  expect_refused(config, "layer_types");
  config = mixtral();
  config["partial_rotary_factor"] = 0.5;
  expect_refused(config, "partial_rotary_factor");
}

// Also those for which no model has such a shape.
TEST_F(HfRefusal, AShapeThatCannotBe) {
  json config = mixtral();
  config["hidden_act"] = "tanh";
  config["num_experts_per_tok"] = 99;
  config["num_key_value_heads"] = 3;
  config["rms_norm_eps"] = 0;
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { parse(config); }),
            "folder/config.json: \"hidden_act\": \"tanh\" is not supported, only \"silu\". "
            "num_attention_heads (4) must be a multiple of num_key_value_heads (3). "
            "num_experts_per_tok (99) is larger than num_local_experts (4). "
            "rms_norm_eps must be positive.");
  config["num_attention_heads"] = "4";
  config["num_hidden_layers"] = 2.5;
  config["tie_word_embeddings"] = 1;
  config.erase("num_experts_per_tok");
  EXPECT_EQ(
      message_of(ExitStatus::bad_request, [&] { parse(config); }),
      "folder/config.json: the field \"num_hidden_layers\" must be an integer of at most "
      "2147483647. The field \"num_attention_heads\" must be an integer of at most "
      "2147483647. The field \"tie_word_embeddings\" must be true or false. \"hidden_act\": "
      "\"tanh\" is not supported, only \"silu\". The field \"num_experts_per_tok\" is missing.");
}

// In whose place nothing else is judged.
TEST_F(HfRefusal, AllMissingFieldsAtOnce) {
  json config = mixtral();
  config["hidden_act"] = "tanh";
  config["pad_token_id"] = 5;
  config["num_key_value_heads"] = 3;
  config["rope_parameters"] = {{"rope_type", "yarn"}};
  for (const char* name : {"vocab_size", "num_hidden_layers", "num_local_experts",
                           "num_experts_per_tok", "intermediate_size"}) {
    config.erase(name);
  }
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { parse(config); }),
            "folder/config.json: \"hidden_act\": \"tanh\" is not supported, only \"silu\". The "
            "fields \"vocab_size\", \"num_hidden_layers\", \"factor\", \"num_local_experts\", "
            "\"num_experts_per_tok\", \"intermediate_size\" are missing.");
  // What is wrong with a list may follow from what is missing.
  config = qwen3_moe();
  config["mlp_only_layers"] = {3};
  config.erase("num_hidden_layers");
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { parse(config); }),
            "folder/config.json: the field \"num_hidden_layers\" is missing.");
}

// What is not supported is read as if it were not there, and so changes no other verdict.
TEST_F(HfRefusal, OfListsAloneWhereOneIsNotSupported) {
  const auto expect_alone = [](const char* fixture, const char* field, size_t layers) {
    json config =
        json::parse(get_file(std::string(TROUPE_FIXTURE_DIR "/hf/") + fixture + "/config.json"));
    config[field] = json::array();
    for (size_t i = 0; i < layers; ++i) config[field].push_back(i == 0 ? "dense" : "other");
    const std::string message = message_of(ExitStatus::bad_request, [&] { parse(config); });
    expect_phrase(message, field);
    EXPECT_EQ(std::count(message.begin(), message.end(), '.'), 2) << message;
  };
  expect_alone("gpt_oss", "layer_types", 2);
  expect_alone("qwen3_next", "layer_types", 4);
  expect_alone("deepseek_v32", "mlp_layer_types", 2);
}

TEST_F(HfRefusal, NamesTheNearestOfNewArchitectures) {
  for (const auto& [fixture, architecture, nearest] :
       {std::tuple("deepseek_v32", "GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM comes nearest"),
        std::tuple("deepseek_v3", "DeepseekV4ForCausalLM",
                   "DeepseekV32ForCausalLM comes nearest")}) {
    json config =
        json::parse(get_file(std::string(TROUPE_FIXTURE_DIR "/hf/") + fixture + "/config.json"));
    config["architectures"] = {architecture};
    expect_refused(config, nearest);
  }
}

TEST_F(HfRefusal, OfMiniMaxM2) {
  const json config = minimax_m2();
  expect_refused(config, "use_qk_norm", false);
  expect_refused(config, "use_routing_bias", false);
  expect_refused(config, "qk_norm_type", "per_head");
  expect_refused(config, "scoring_func", "softmax");
  expect_refused(config, "shared_intermediate_size", 64);
  expect_refused(config, "router_jitter_noise", 0.1);
  expect_refused(config, "layernorm_mlp_beta", 3.5);
  expect_refused(config, "attn_type_list", json{1, 0});
  expect_refused(config, "attention_bias", true);
  expect_refused(config, "partial_rotary_factor", 0.25);  // rotary_dim says another part
  json parts = config;
  parts["rope_parameters"] = {
      {"rope_theta", 5e6}, {"rope_type", "default"}, {"partial_rotary_factor", 0.25}};
  expect_refused(parts, "\"rotary_dim\" (8) and \"partial_rotary_factor\", which makes 4 elements");
  parts["rope_parameters"]["partial_rotary_factor"] = 0.5;
  EXPECT_EQ(parse(parts).rotary_dim(), 8);
}

TEST_F(HfRefusal, OfLing2) {
  json config = json::parse(get_file(TROUPE_FIXTURE_DIR "/hf/ling_v2/config.json"));
  expect_refused(config, "use_bias", true);
  expect_refused(config, "norm_topk_prob", false);
  expect_refused(config, "moe_router_enable_expert_bias", false);
  expect_refused(config, "score_function", "softmax");
  expect_refused(config, "embedding_dropout", 0.1);
  expect_refused(config, "output_dropout", 0.1);
}

// The configuration of a folder among the fixtures.
json fixture_config(const std::string& name) {
  return json::parse(get_file(std::string(TROUPE_FIXTURE_DIR "/hf/") + name + "/config.json"));
}

TEST_F(HfRefusal, OfDeepSeeks) {
  for (const char* name : {"deepseek_v2", "deepseek_v3", "deepseek_v32"}) {
    SCOPED_TRACE(name);
    const json config = fixture_config(name);
    expect_refused(config, "n_shared_experts", -1);
    expect_refused(config, "n_shared_experts", std::numeric_limits<int32_t>::max());
    expect_refused(config, "first_k_dense_replace", -1);
    expect_refused(config, "moe_layer_freq", 0);
    expect_refused(config, "scoring_func", "tanh");
    expect_refused(config, "topk_method", "random");
    expect_refused(config, "qk_nope_head_dim", (1 << 24) + 1);
    expect_refused(config, "qk_rope_head_dim", (1 << 24) + 2);
  }
  expect_refused(fixture_config("deepseek_v2"), "scoring_func", "sigmoid");
  expect_refused(fixture_config("deepseek_v2"), "norm_topk_prob", true);
  expect_refused(fixture_config("deepseek_v3"), "scoring_func", "softmax");
  // Every weight would be 1.
  expect_refused(fixture_config("deepseek_v3_top1"), "norm_topk_prob", true);
  json without_groups = fixture_config("deepseek_v2");
  without_groups["topk_method"] = "group_limited_greedy";
  without_groups.erase("topk_group");
  expect_refused(without_groups, "topk_group");
}

TEST_F(HfRefusal, OfTheDeepSeekWithAnIndexer) {
  const json config = fixture_config("deepseek_v32");
  expect_refused(config, "q_lora_rank", nullptr);
  expect_refused(config, "index_topk", 0);
  expect_refused(config, "layer_types", {"deepseek_sparse_attention", "full_attention"});
  expect_refused(config, "layer_types", "deepseek_sparse_attention");
  expect_refused(config, "mlp_layer_types", json::array({"dense"}));
  expect_refused(config, "mlp_layer_types", "dense");
  expect_refused(config, "mlp_layer_types", {"dense", "mixed"});
  json smallest = config;
  smallest["index_topk"] = 1;
  EXPECT_EQ(parse(smallest).dsa_indexer_topk, 1);
  // A layer that only the list calls dense needs its size, too.
  json by_list = config;
  by_list["first_k_dense_replace"] = 0;
  by_list["mlp_layer_types"] = {"sparse", "dense"};
  EXPECT_EQ(parse(by_list).moe_layers, (std::vector<bool>{true, false}));
  EXPECT_EQ(parse(by_list).ffn_hidden_size, 72);
  by_list.erase("intermediate_size");
  expect_refused(by_list, "intermediate_size");
}

TEST_F(HfRefusal, OfGptOss) {
  const json config = fixture_config("gpt_oss");
  expect_refused(config, "attention_bias", false);
  expect_refused(config, "layer_types", "full_attention");
  expect_refused(config, "layer_types", json::array({"full_attention"}));
  expect_refused(config, "layer_types", {"full_attention", "chunked_attention"});
  expect_refused(config, "swiglu_alpha", 1.5);
}

TEST_F(HfRefusal, RopeScaling) {
  json config = qwen3_moe();
  config["rope_parameters"] = {{"rope_type", "dynamic"}, {"factor", 4.0}, {"rope_theta", 1e6}};
  expect_refused(config, "RoPE of type \"dynamic\" is not supported, only \"default\", \"linear\"");
  config = in_older_dialect(qwen3_moe());
  config["rope_scaling"] = {{"type", "linear"}};
  expect_refused(config, "the field \"factor\" is missing");
  config["rope_scaling"] = {{"rope_type", "llama3"}, {"factor", 8.0}, {"low_freq_factor", 1.0}};
  expect_refused(config, "the field \"high_freq_factor\" is missing");
  config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 8.0}, {"beta_fast", 0.5}};
  expect_refused(config, "rope_scaling_slow (1) must be positive, and rope_scaling_fast (0.5) at");
  config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", -8.0}};
  expect_refused(config, "factor must be positive, it is -8");
  config["rope_scaling"] = {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}};
  expect_refused(config, "partial_rotary_factor");
}

// What flags change of the angles is written in the spellings that the source has.
TEST(HfConfig, ChangedRopeScalingIsWrittenOver) {
  json config = in_older_dialect(qwen3_moe());
  config["rope_scaling"] = {
      {"type", "yarn"}, {"factor", 8.0}, {"mscale", 1.0}, {"original_max_position_embeddings", 64}};
  const std::string text = config.dump(2);
  ModelConfig model = parse(config);
  model.rope_scaling_factor = 16;
  const auto written = [&] {
    return json::parse(write_hf_config(model, {.text = text, .has_weights = true}));
  };
  EXPECT_EQ(written()["rope_scaling"]["factor"], 16.0);
  EXPECT_EQ(written()["rope_scaling"]["type"], "yarn");
  EXPECT_FALSE(written().contains("rope_parameters"));
  model.rope_scaling_type = RopeScalingKind::linear;
  model.rope_original_positions = 0;
  model.rope_scaling_fast = model.rope_scaling_slow = model.rope_mscale = 0;
  EXPECT_EQ(written()["rope_scaling"],
            json({{"type", "linear"}, {"rope_type", "linear"}, {"factor", 16.0}}));
}

TEST_F(HfRefusal, AbsurdSizes) {
  for (const json& value :
       {json(0), json(-1), json(2'000'000'000), json(int64_t{1} << 40), json(~uint64_t{0})}) {
    for (const char* name :
         {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}) {
      expect_refused(qwen3_moe(), name, value);
    }
    json config = qwen3_moe();
    config["num_local_experts"] = value;
    expect_refused(config, "num_local_experts");
  }
  expect_refused(mixtral(), "num_hidden_layers", 10'001);
  expect_refused(qwen3_moe(), "decoder_sparse_step", 0);
  expect_refused(qwen3_moe(), "mlp_only_layers", json::array({6}));
  expect_refused(qwen3_moe(), "mlp_only_layers", json::array({-1}));
}

// These are found where the shape is checked as a whole; the names are still those of the file.
TEST_F(HfRefusal, SizesThatDoNotFitTogether) {
  expect_refused(mixtral(), "num_key_value_heads", 3);
  expect_refused(mixtral(), "num_experts_per_tok", 5);
  expect_refused(qwen3_moe(), "rms_norm_eps", 0);
  json odd = qwen3_moe();
  odd["head_dim"] = 7;
  expect_refused(odd, "it is 7 of the head size 7");
}

TEST_F(HfRefusal, HeadSizeThatIsNotWhole) {
  json config = mixtral();
  config["hidden_size"] = 50;
  expect_refused(config, "head_dim");
}

TEST_F(HfRefusal, NotAConfiguration) {
  expect_refused(json::array(), "JSON object");
  const auto message = [](const char* text) {
    return message_of(ExitStatus::failed, [&] { parse_hf_config(text, "folder/config.json"); });
  };
  expect_phrase(message("{\"vocab_size\": 1"), "folder/config.json");
  expect_phrase(message("{\"vocab_size\": 1, \"vocab_size\": 2}"), "vocab_size");
  expect_phrase(message(""), "folder/config.json");
}

// A fixture, loaded into fresh storage of some compute type.
struct Loaded {
  Loaded(const std::string& path, DType dtype)
      : config(read_hf_config(path + "/config.json")),
        state(declare_model_state(config, dtype, /*trained=*/false)),
        storage(state.table) {
    load_hf_weights(path, config, state, storage);
  }
  ModelConfig config;
  ModelState state;
  StateStorage storage;
};

std::string fixture(const std::string& name) {
  return TROUPE_FIXTURE_DIR "/hf/" + name;
}

constexpr uint64_t kOneFile = 1 << 30;

class HfFolder : public ::testing::TestWithParam<const char*> {};

TEST_P(HfFolder, ComesBackByteForByte) {
  const TempFolder folder;
  const Loaded model(fixture(GetParam()), DType::f32);
  save_hf_model(folder / "copy", model.config, model.state, elements_in(model.storage), kOneFile);
  const SafetensorsFolder before = SafetensorsFolder::open(fixture(GetParam()));
  const SafetensorsFolder after = SafetensorsFolder::open(folder / "copy");
  size_t tensors = 0;
  for (const SafetensorsFile& file : before.files()) {
    for (const TensorEntry& entry : file.entries()) {
      const auto other = after.find(entry.name);
      ASSERT_NE(other.entry, nullptr) << entry.name;
      EXPECT_EQ(static_cast<const TensorSpec&>(*other.entry), entry) << entry.name;
      const auto bytes = file.bytes(entry);
      EXPECT_TRUE(
          std::equal(bytes.begin(), bytes.end(), other.bytes().begin(), other.bytes().end()))
          << entry.name;
      ++tensors;
    }
  }
  size_t written = 0;
  for (const SafetensorsFile& file : after.files()) written += file.entries().size();
  EXPECT_EQ(written, tensors);
  EXPECT_EQ(read_hf_config(folder / "copy/config.json"), model.config);
}

// Written as several files with an index, each within its limit, it loads to the same bits.
TEST_P(HfFolder, ComesBackFromShards) {
  const TempFolder folder;
  const Loaded model(fixture(GetParam()), DType::f32);
  constexpr uint64_t kShardBytes = 40'000;
  save_hf_model(folder / "shards", model.config, model.state, elements_in(model.storage),
                kShardBytes);
  const SafetensorsFolder shards = SafetensorsFolder::open(folder / "shards");
  EXPECT_GT(shards.files().size(), 3U);
  for (const SafetensorsFile& file : shards.files()) {
    // Or a single tensor: all experts of a layer, in GPT-OSS.
    if (file.entries().size() == 1) continue;
    EXPECT_LE(file.file_bytes() - file.header().size(), kShardBytes) << file.path();
  }
  const Loaded again(folder / "shards", DType::f32);
  for (const Parameter& parameter : model.state.parameters) {
    const TensorView before = model.storage.view(parameter.value);
    const TensorView after = again.storage.view(parameter.value);
    EXPECT_EQ(std::memcmp(before.data, after.data,
                          static_cast<size_t>(before.shape.elements()) * sizeof(float)),
              0)
        << (*model.state.table)[parameter.value].name;
  }
}

// A bf16 model keeps the weights of norms in f32; its folder is all bf16, and comes back from there
// without a change.
TEST_P(HfFolder, OfABf16ModelIsBf16) {
  const TempFolder folder;
  const Loaded model(fixture(GetParam()), DType::bf16);
  save_hf_model(folder / "first", model.config, model.state, elements_in(model.storage), kOneFile);
  EXPECT_EQ(hf_folder_dtype(folder / "first"), DType::bf16);
  const Loaded again(folder / "first", DType::bf16);
  save_hf_model(folder / "second", again.config, again.state, elements_in(again.storage), kOneFile);
  EXPECT_EQ(get_file(folder / "first/model.safetensors"),
            get_file(folder / "second/model.safetensors"));
}

// The tensors of a model tile its parameters: written over everything, they leave no element alone.
TEST_P(HfFolder, TensorsTileTheParameters) {
  const ModelConfig config = read_hf_config(fixture(GetParam()) + "/config.json");
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
  std::vector<std::vector<int>> written(state.parameters.size());
  for (const Parameter& parameter : state.parameters) {
    written[parameter.number()].resize(
        static_cast<size_t>((*state.table)[parameter.value].shape.elements()));
  }
  for (const HfTensor& tensor : hf_tensors(config)) {
    if (!tensor.parameter.valid()) {
      EXPECT_TRUE(state.expert_biases.at(static_cast<size_t>(tensor.layer)).valid());
      EXPECT_EQ(tensor.shape, Shape({config.num_experts}));
      continue;
    }
    for (const HfPiece& piece : tensor.pieces()) {
      for (int64_t i = 0; i < piece.elements; ++i) {
        ++written[static_cast<size_t>(tensor.parameter.index)].at(
            static_cast<size_t>(piece.offset + i));
      }
    }
  }
  for (const std::vector<int>& counts : written) {
    EXPECT_EQ(counts, std::vector<int>(counts.size(), 1));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fixtures, HfFolder,
    ::testing::Values("mixtral", "mixtral_window_tied", "qwen3_moe", "qwen3_moe_mixed_layers",
                      "qwen3_moe_first_dense", "qwen2_moe", "olmoe", "llama_dense", "qwen3_dense",
                      "deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_yarn",
                      "deepseek_v3_top1", "deepseek_v32", "glm4moe", "glm4_moe_biased", "gpt_oss",
                      "gpt_oss_odd", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_odd", "minimax_m2",
                      "minimax_m2_odd", "ling_v2", "ling_v2_odd", "qwen3_moe_yarn",
                      "llama_llama3_rope", "llama_linear_rope"),
    [](const auto& info) { return std::string(info.param); });

// What config.json announces, and no other tensor.
TEST(HfWeights, LayersOfMultiTokenPredictionAreLeftOut) {
  const TempFolder folder;
  const std::string source = fixture("deepseek_v3");
  json config = json::parse(get_file(source + "/config.json"));
  config["num_hidden_layers"] = 1;  // the second layer then stands where predictions do
  config["num_nextn_predict_layers"] = 1;
  const auto load = [&] {
    put_file(folder / "config.json", config.dump());
    put_file(folder / "model.safetensors", get_file(source + "/model.safetensors"));
    return Loaded(folder.path(), DType::f32);
  };
  const Loaded whole(source, DType::f32);
  const Loaded loaded = load();
  for (const Parameter& parameter : loaded.state.parameters) {
    if (parameter.layer != 0) continue;
    const TensorView own = loaded.storage.view(parameter.value);
    const TensorView expected =
        whole.storage.view(whole.state.parameters[parameter.number()].value);
    ASSERT_EQ(std::memcmp(own.data, expected.data,
                          static_cast<size_t>(own.shape.elements()) * sizeof(float)),
              0)
        << parameter.full_name();
  }
  config["num_nextn_predict_layers"] = 0;
  expect_phrase(message_of(ExitStatus::bad_request, load),
                "the tensor model.layers.1.input_layernorm.weight has no place");
}

// Qwen3-Next has another name for them, and its config.json does not mention them.
TEST(HfWeights, SilentLayersOfMultiTokenPredictionAreLeftOut) {
  const auto loaded_with = [](const std::string& source, const std::string& name) {
    const TempFolder folder;
    const std::string file = get_file(fixture(source) + "/model.safetensors");
    uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof length);
    json header = json::parse(file.substr(sizeof length, length));
    const uint64_t end = file.size() - sizeof length - length;
    header[name] = {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {end, end + 4}}};
    const std::string text = header.dump();
    length = text.size();
    put_file(folder / "config.json", get_file(fixture(source) + "/config.json"));
    put_file(folder / "model.safetensors",
             std::string(reinterpret_cast<const char*>(&length), sizeof length) + text +
                 file.substr(file.size() - end) + std::string(4, '\0'));
    return Loaded(folder.path(), DType::f32);
  };
  const Loaded whole(fixture("qwen3_next"), DType::f32);
  const Loaded loaded = loaded_with("qwen3_next", "mtp.norm.weight");
  EXPECT_EQ(loaded.state.parameters.size(), whole.state.parameters.size());
  EXPECT_EQ(hf_prediction_layers(fixture("qwen3_next") + "/config.json"), 1);
  EXPECT_EQ(hf_prediction_layers(fixture("qwen3_moe") + "/config.json"), 0);
  expect_phrase(
      message_of(ExitStatus::bad_request, [&] { loaded_with("qwen3_moe", "mtp.norm.weight"); }),
      "the tensor mtp.norm.weight has no place");
  expect_phrase(message_of(ExitStatus::bad_request,
                           [&] { loaded_with("qwen3_next", "model.mtp.norm.weight"); }),
                "the tensor model.mtp.norm.weight has no place");
}

// Writes the folder's tensors again, those that are kept, and its config.json.
void copy_folder(const std::string& from, const std::string& to,
                 const std::function<bool(const std::string&)>& keeps) {
  const SafetensorsFolder folder = SafetensorsFolder::open(from);
  std::vector<TensorSpec> specs;
  for (const SafetensorsFile& file : folder.files()) {
    for (const TensorEntry& entry : file.entries()) {
      if (keeps(entry.name)) specs.push_back(entry);
    }
  }
  const Disk disk;
  SafetensorsFolderWriter writer(disk, to, specs, uint64_t{1} << 30);
  for (size_t i = 0; i < specs.size(); ++i) writer.append(i, folder.find(specs[i].name).bytes());
  writer.finish();
  put_file(to + "/config.json", get_file(from + "/config.json"));
}

// What a family's layers of multi-token prediction are called.
struct MtpFolder {
  const char* fixture;
  std::vector<std::string> tensors;  // some, with {} for the number of the model's layers
  int32_t layers = 1;
};

void PrintTo(const MtpFolder& folder, std::ostream* out) {
  *out << folder.fixture;
}

class HfMtpFolder : public ::testing::TestWithParam<MtpFolder> {
 protected:
  HfMtpFolder() : config(read_hf_config(fixture(GetParam().fixture) + "/config.json")) {
    config.mtp_num_layers = GetParam().layers;
  }

  // A folder of the family's model with such layers, of which no two elements are alike.
  std::string write(const HfExport& what = {}) const {
    const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
    const StateStorage storage(state.table);
    number_elements(state, storage);
    save_hf_model(folder / "model", config, state, elements_in(storage), kOneFile, what);
    return folder / "model";
  }

  // Of the tensors of the model without such layers, sorted.
  std::vector<std::string> names_of_others() const {
    ModelConfig without = config;
    without.mtp_num_layers = 0;
    std::vector<std::string> names;
    for (const HfTensor& tensor : hf_tensors(without)) names.push_back(tensor.name);
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string name_of_tensor(std::string name) const {
    const size_t at = name.find("{}");
    return at == std::string::npos ? name : name.replace(at, 2, std::to_string(config.num_layers));
  }

  ModelConfig config;
  TempFolder folder;
};

TEST_P(HfMtpFolder, HasTheNamesOfItsFamily) {
  const SafetensorsFolder written = SafetensorsFolder::open(write());
  for (const std::string& name : GetParam().tensors) {
    EXPECT_NE(written.find(name_of_tensor(name)).entry, nullptr) << name_of_tensor(name);
  }
}

TEST_P(HfMtpFolder, ComesBackByteForByte) {
  const std::string path = write();
  EXPECT_EQ(find_hf_prediction_layers(path).readable(), GetParam().layers);
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
  const StateStorage storage(state.table);
  load_hf_weights(path, config, state, storage);
  save_hf_model(folder / "copy", config, state, elements_in(storage), kOneFile);
  EXPECT_EQ(get_file(folder / "copy/model.safetensors"), get_file(path + "/model.safetensors"));
  EXPECT_EQ(get_file(folder / "copy/config.json"), get_file(path + "/config.json"));
}

// As many as are asked for are read, and the others left out.
TEST_P(HfMtpFolder, IsAlsoAModelWithoutThem) {
  const std::string path = write();
  const Loaded whole(path, DType::f32);
  EXPECT_EQ(whole.config.mtp_num_layers, 0);
  ModelConfig more = config;
  more.mtp_num_layers += 1;
  const ModelState state = declare_model_state(more, DType::f32, /*trained=*/false);
  const StateStorage storage(state.table);
  expect_phrase(
      message_of(ExitStatus::bad_request, [&] { load_hf_weights(path, more, state, storage); }),
      "layers of multi-token prediction");
}

// None of them can be missing unnoticed: each is named, and copies alone may be left out.
TEST_P(HfMtpFolder, NamesTheOneThatIsMissing) {
  const std::string path = write();
  const std::vector<std::string> others = names_of_others();
  const SafetensorsFolder whole = SafetensorsFolder::open(path);
  EXPECT_EQ(find_hf_prediction_layers(path).missing, "");
  size_t theirs = 0;
  for (const HfTensor& tensor : hf_tensors(config)) {
    if (std::binary_search(others.begin(), others.end(), tensor.name)) continue;
    const std::string part = folder / ("without_" + std::to_string(theirs++));
    copy_folder(path, part, [&](const std::string& name) { return name != tensor.name; });
    const HfPredictionLayers found = find_hf_prediction_layers(part);
    EXPECT_EQ(found.held, GetParam().layers) << tensor.name;
    EXPECT_EQ(found.missing, tensor.is_copy() ? "" : tensor.name);
    std::filesystem::remove_all(part);
  }
  EXPECT_GT(theirs, 10U);
}

// As some are published: announced, and not there.
TEST_P(HfMtpFolder, MayHaveNoneOfThem) {
  const std::string path = write();
  const std::vector<std::string> others = names_of_others();
  copy_folder(path, folder / "none", [&](const std::string& name) {
    return std::binary_search(others.begin(), others.end(), name);
  });
  const HfPredictionLayers found = find_hf_prediction_layers(folder / "none");
  EXPECT_EQ(found.held, 0);
  EXPECT_EQ(found.missing, "");
  const json document = json::parse(get_file(path + "/config.json"));
  const bool is_silent =
      !document.contains("num_nextn_predict_layers") && !document.contains("mtp_num_hidden_layers");
  EXPECT_EQ(found.announced, is_silent ? 0 : GetParam().layers);
  EXPECT_EQ(Loaded(folder / "none", DType::f32).config.mtp_num_layers, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Families, HfMtpFolder,
    ::testing::Values(
        MtpFolder{
            "deepseek_v3",
            {"model.layers.{}.enorm.weight", "model.layers.{}.hnorm.weight",
             "model.layers.{}.eh_proj.weight", "model.layers.{}.embed_tokens.weight",
             "model.layers.{}.shared_head.norm.weight", "model.layers.{}.shared_head.head.weight",
             "model.layers.{}.input_layernorm.weight", "model.layers.{}.self_attn.kv_b_proj.weight",
             "model.layers.{}.mlp.gate.e_score_correction_bias",
             "model.layers.{}.mlp.shared_experts.up_proj.weight",
             "model.layers.{}.mlp.experts.0.down_proj.weight"},
            2},
        MtpFolder{
            "glm4_moe_biased",
            {"model.layers.{}.enorm.weight", "model.layers.{}.hnorm.weight",
             "model.layers.{}.eh_proj.weight", "model.layers.{}.embed_tokens.weight",
             "model.layers.{}.shared_head.norm.weight", "model.layers.{}.shared_head.head.weight",
             "model.layers.{}.self_attn.q_proj.bias",
             "model.layers.{}.mlp.gate.e_score_correction_bias"}},
        MtpFolder{"qwen3_next",
                  {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight",
                   "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.input_layernorm.weight",
                   "mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.self_attn.q_norm.weight",
                   "mtp.layers.0.post_attention_layernorm.weight", "mtp.layers.0.mlp.gate.weight",
                   "mtp.layers.0.mlp.experts.0.gate_proj.weight",
                   "mtp.layers.0.mlp.shared_expert_gate.weight"}},
        MtpFolder{"qwen3_5_moe",
                  {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight",
                   "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.q_proj.weight",
                   "mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight"}}),
    [](const auto& info) { return std::string(info.param.fixture); });

// Architectures whose layers of multi-token prediction are not read, whatever their tensors are
// called: the folder is that of a model without them.
TEST(HfMtp, LayersOfOtherFamiliesAreLeftOut) {
  for (const auto& [name, tensor] :
       {std::pair("deepseek_v32", "enorm.weight"), std::pair("deepseek_v32", "unknown.weight"),
        std::pair("ling_v2", "enorm.weight"), std::pair("ling_v2", "final_layernorm.weight")}) {
    SCOPED_TRACE(std::string(name) + " " + tensor);
    const TempFolder folder;
    const SafetensorsFolder from = SafetensorsFolder::open(fixture(name));
    ModelConfig config = read_hf_config(fixture(name) + "/config.json");
    std::vector<TensorSpec> specs;
    for (const SafetensorsFile& file : from.files()) {
      specs.insert(specs.end(), file.entries().begin(), file.entries().end());
    }
    const Disk disk;
    specs.push_back(
        {"model.layers." + std::to_string(config.num_layers) + "." + tensor, FileDType::f32, {1}});
    SafetensorsFolderWriter writer(disk, folder.path(), specs, uint64_t{1} << 30);
    for (size_t i = 0; i + 1 < specs.size(); ++i) {
      writer.append(i, from.find(specs[i].name).bytes());
    }
    writer.append(specs.size() - 1, std::vector<std::byte>(4));
    writer.finish();
    json document = json::parse(get_file(fixture(name) + "/config.json"));
    document["num_nextn_predict_layers"] = 1;
    put_file(folder / "config.json", document.dump());
    const HfPredictionLayers found = find_hf_prediction_layers(folder.path());
    EXPECT_EQ(found.announced, 1);
    EXPECT_EQ(found.held, 1);
    EXPECT_FALSE(found.are_read);
    EXPECT_EQ(found.readable(), 0);
    EXPECT_EQ(found.missing, "");
    EXPECT_NO_THROW(Loaded(folder.path(), DType::f32));
    config.mtp_num_layers = 1;
    const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
    const StateStorage storage(state.table);
    expect_phrase(message_of(ExitStatus::bad_request,
                             [&] { load_hf_weights(folder.path(), config, state, storage); }),
                  "layers of multi-token prediction of " + config.hf_architecture +
                      " are not read, so the model can have none.");
  }
}

// Embedding and head are shared: a copy that is another tensor cannot be read.
TEST(HfMtp, CopiesMustBeAlike) {
  const TempFolder folder;
  ModelConfig config = read_hf_config(fixture("deepseek_v3") + "/config.json");
  config.mtp_num_layers = 1;
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
  const StateStorage storage(state.table);
  save_hf_model(folder / "model", config, state, elements_in(storage), kOneFile);
  const std::string path = folder / "model/model.safetensors";
  std::string file = get_file(path);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const json header = json::parse(file.substr(sizeof length, length));
  const std::string name =
      "model.layers." + std::to_string(config.num_layers) + ".shared_head.head.weight";
  const auto begin = header.at(name).at("data_offsets").at(0).get<size_t>();
  file[sizeof length + length + begin] = 1;
  put_file(path, file);
  expect_phrase(message_of(ExitStatus::bad_request,
                           [&] { load_hf_weights(folder / "model", config, state, storage); }),
                name + " differs from lm_head.weight");
  config.mtp_num_layers = 0;
  const ModelState without = declare_model_state(config, DType::f32, /*trained=*/false);
  const StateStorage own(without.table);
  load_hf_weights(folder / "model", config, without, own);
}

// What joins the inputs stays as it is, as in the published folders, and so do copies.
TEST(HfMtp, Fp8LeavesTheProjectionAlone) {
  const TempFolder folder;
  ModelConfig config = read_hf_config(fixture("deepseek_v3") + "/config.json");
  config.mtp_num_layers = 1;
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
  const StateStorage storage(state.table);
  save_hf_model(folder / "model", config, state, elements_in(storage), kOneFile,
                {.dtype = FileDType::bf16, .quantization = HfQuantization::fp8_block});
  const SafetensorsFolder written = SafetensorsFolder::open(folder / "model");
  const std::string prefix = "model.layers." + std::to_string(config.num_layers) + ".";
  for (const char* name : {"eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight"}) {
    EXPECT_EQ(written.find(prefix + name).entry->dtype, FileDType::bf16) << name;
  }
  EXPECT_EQ(written.find(prefix + "self_attn.o_proj.weight").entry->dtype, FileDType::f8e4m3);
  const auto kept = json::parse(hf_quantization_config(config, HfQuantization::fp8_block))
                        .at("modules_to_not_convert")
                        .get<std::vector<std::string>>();
  EXPECT_NE(std::find(kept.begin(), kept.end(), prefix + "eh_proj"), kept.end());
  json with_codes = json::parse(get_file(folder / "model/config.json"));
  with_codes["quantization_config"] =
      json::parse(hf_quantization_config(config, HfQuantization::fp8_block));
  put_file(folder / "model/config.json", with_codes.dump());
  load_hf_weights(folder / "model", config, state, storage);
}

// A type that does not hold a weight would make it infinite, silently.
TEST(HfWeights, AValueThatTheTypeDoesNotHoldIsRefused) {
  const TempFolder folder;
  const Loaded model(fixture("mixtral"), DType::f32);
  const Parameter& embedding = model.state.parameters.front();
  const TensorView values = model.storage.view(embedding.value);
  const auto save = [&](FileDType dtype) {
    save_hf_model(folder / "out", model.config, model.state, elements_in(model.storage), kOneFile,
                  {.dtype = dtype});
  };
  values.as<float>()[5] = 65519;  // rounds to the largest number of f16
  save(FileDType::f16);
  std::filesystem::remove_all(folder / "out");
  std::string message;
  for (const int element : {5, 0}) {
    values.as<float>()[element] = 65520;
    message = message_of(ExitStatus::failed, [&] { save(FileDType::f16); });
    expect_phrase(message,
                  "The tensor model.embed_tokens.weight is not finite as F16, at element " +
                      std::to_string(element) + " of ");
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "out/config.json"));
  save(FileDType::bf16);
}

// Where the layer has names of its own, too; what is not quantised is listed.
TEST(HfMtp, Fp8TakesTheMatricesOfALayerApart) {
  for (const char* name : {"qwen3_next", "qwen3_5_moe"}) {
    SCOPED_TRACE(name);
    const TempFolder folder;
    ModelConfig config = read_hf_config(fixture(name) + "/config.json");
    config.mtp_num_layers = 1;
    const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
    const StateStorage storage(state.table);
    save_hf_model(folder / "model", config, state, elements_in(storage), kOneFile,
                  {.dtype = FileDType::bf16, .quantization = HfQuantization::fp8_block});
    const SafetensorsFolder written = SafetensorsFolder::open(folder / "model");
    const auto kept = json::parse(hf_quantization_config(config, HfQuantization::fp8_block))
                          .at("modules_to_not_convert")
                          .get<std::vector<std::string>>();
    size_t quantised = 0;
    for (const TensorEntry& entry : written.files().front().entries()) {
      if (!entry.name.starts_with("mtp.") || entry.shape.size() != 2) continue;
      if (entry.name.ends_with("_scale_inv")) continue;
      const std::string module = entry.name.substr(0, entry.name.size() - 7);  // .weight
      const bool listed = std::find(kept.begin(), kept.end(), module) != kept.end();
      EXPECT_EQ(entry.dtype, listed ? FileDType::bf16 : FileDType::f8e4m3) << entry.name;
      quantised += listed ? 0U : 1U;
    }
    EXPECT_GT(quantised, 3U);
    for (const char* module :
         {"mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"}) {
      EXPECT_NE(std::find(kept.begin(), kept.end(), module), kept.end()) << module;
    }
    EXPECT_EQ(written.find("mtp.layers.0.self_attn.o_proj.weight").entry->dtype, FileDType::f8e4m3);
  }
}

// Of convolutions the last dimension but one is 1, and no block of a scale.
TEST(HfWeights, Fp8LeavesConvolutionsAlone) {
  const TempFolder folder;
  const Loaded model(fixture("qwen3_next"), DType::f32);
  save_hf_model(folder / "fp8", model.config, model.state, elements_in(model.storage), kOneFile,
                {.dtype = FileDType::bf16, .quantization = HfQuantization::fp8_block});
  const SafetensorsFolder written = SafetensorsFolder::open(folder / "fp8");
  const std::string prefix = "model.layers.0.linear_attn.";
  const TensorEntry* convolution = written.find(prefix + "conv1d.weight").entry;
  EXPECT_EQ(convolution->dtype, FileDType::bf16);
  EXPECT_EQ(convolution->shape.size(), 3U);
  EXPECT_EQ(written.find(prefix + "out_proj.weight").entry->dtype, FileDType::f8e4m3);
  const auto kept = json::parse(hf_quantization_config(model.config, HfQuantization::fp8_block))
                        .at("modules_to_not_convert")
                        .get<std::vector<std::string>>();
  EXPECT_NE(std::find(kept.begin(), kept.end(), prefix + "conv1d"), kept.end());
}

// A layer that serves several depths is one outside, whatever it is used for.
TEST(HfMtp, ARepeatedLayerIsOne) {
  for (const char* family : {"deepseek_v3", "qwen3_next"}) {
    SCOPED_TRACE(family);
    const TempFolder folder;
    ModelConfig config = read_hf_config(fixture(family) + "/config.json");
    config.mtp_num_layers = 1;
    const std::vector<HfTensor> of_one = hf_tensors(config);
    config.mtp_num_layers = 3;
    config.mtp_use_repeated_layer = true;
    EXPECT_EQ(why_no_hf_form(config), "");
    const std::vector<HfTensor> of_three = hf_tensors(config);
    ASSERT_EQ(of_three.size(), of_one.size());
    for (size_t i = 0; i < of_one.size(); ++i) EXPECT_EQ(of_three[i].name, of_one[i].name);

    const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
    const StateStorage storage(state.table);
    number_elements(state, storage);
    save_hf_model(folder / "model", config, state, elements_in(storage), kOneFile);
    EXPECT_EQ(find_hf_prediction_layers(folder / "model").readable(), 1);
    const StateStorage again(state.table);
    load_hf_weights(folder / "model", config, state, again);
    for (int32_t id = 0; id < state.table->size(); ++id) {
      const TensorView a = storage.view(StateId{id});
      const TensorView b = again.view(StateId{id});
      EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<size_t>(a.shape.elements()) * 4), 0)
          << (*state.table)[StateId{id}].name;
    }
  }
}

TEST(HfConfig, OneGroupAndAWindowOfOneTokenAreWritten) {
  ModelConfig groups = read_hf_config(fixture("deepseek_v2_groups") + "/config.json");
  groups.moe_router_num_groups = 1;
  groups.moe_router_group_topk = 1;
  EXPECT_EQ(parse_hf_config(write_hf_config(groups), "config.json").moe_router_num_groups, 1);
  ModelConfig window = read_hf_config(fixture("gpt_oss") + "/config.json");
  window.sliding_window = 1;
  EXPECT_EQ(parse_hf_config(write_hf_config(window), "config.json").sliding_window, 1);
}

// Few, but not none.
TEST(HfConfig, AModelOfOneExpertHasAForm) {
  ModelConfig config = read_hf_config(fixture("mixtral") + "/config.json");
  config.num_experts = 1;
  config.moe_router_topk = 1;
  EXPECT_EQ(why_no_hf_form(config), "");
  config.hf_architecture = "LlamaForCausalLM";
  expect_phrase(why_no_hf_form(config), "num_experts = 1");
}

// A family that has none cannot say that a model does.
TEST(HfMtp, OnlySomeFamiliesHaveThem) {
  ModelConfig config = read_hf_config(fixture("qwen3_moe") + "/config.json");
  EXPECT_EQ(why_no_hf_form(config), "");
  config.mtp_num_layers = 1;
  expect_phrase(why_no_hf_form(config), "mtp_num_layers = 1");
  config = read_hf_config(fixture("qwen3_next") + "/config.json");
  config.mtp_num_layers = 1;
  EXPECT_EQ(why_no_hf_form(config), "");
  config.mtp_num_layers = 2;
  expect_phrase(why_no_hf_form(config), "mtp_num_layers = 2");
}

TEST(HfWeights, WiderAndNarrowerTypes) {
  const Loaded exact(fixture("mixtral"), DType::f32);
  const Loaded wide(fixture("mixtral"), DType::f64);
  const Loaded narrow(fixture("mixtral"), DType::bf16);
  for (const Parameter& parameter : exact.state.parameters) {
    const TensorView from = exact.storage.view(parameter.value);
    for (int64_t i = 0; i < from.shape.elements(); ++i) {
      const float value = from.as<float>()[i];
      ASSERT_EQ(wide.storage.view(parameter.value).as<double>()[i], value);
      const TensorView rounded = narrow.storage.view(parameter.value);
      if (rounded.dtype == DType::f32) {
        ASSERT_EQ(rounded.as<float>()[i], value);  // norms keep what they have
      } else {
        ASSERT_EQ(rounded.as<bf16>()[i].bits, bf16(value).bits);
      }
    }
  }
}

// fp16 has bits that bf16 lacks.
TEST(HfWeights, AFolderIsReadInTheNarrowestTypeThatHoldsIt) {
  const TempFolder folder;
  const Loaded model(fixture("mixtral"), DType::f32);
  for (const auto& [written, read] :
       {std::pair(FileDType::bf16, DType::bf16), std::pair(FileDType::f16, DType::f32),
        std::pair(FileDType::f32, DType::f32), std::pair(FileDType::f64, DType::f64)}) {
    const std::string copy = folder / std::string(name_of(written));
    save_hf_model(copy, model.config, model.state, elements_in(model.storage), kOneFile,
                  {.dtype = written});
    EXPECT_EQ(hf_folder_dtype(copy), read) << name_of(written);
  }
}

// A folder of several types comes back in them, whatever the model was read in.
TEST(HfWeights, EachTensorKeepsTheTypeOfItsFolder) {
  constexpr FileDType kTypes[] = {FileDType::bf16, FileDType::f32, FileDType::f16, FileDType::f64};
  for (const char* name : {"deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe"}) {
    SCOPED_TRACE(name);
    const TempFolder folder;
    const SafetensorsFolder from = SafetensorsFolder::open(fixture(name));
    std::vector<TensorSpec> specs;
    for (const SafetensorsFile& file : from.files()) {
      specs.insert(specs.end(), file.entries().begin(), file.entries().end());
    }
    for (size_t i = 0; i < specs.size(); ++i) specs[i].dtype = kTypes[i % 7 % 4];
    const Disk disk;
    SafetensorsFolderWriter writer(disk, folder / "mixed", specs, uint64_t{1} << 30);
    for (size_t i = 0; i < specs.size(); ++i) {
      std::vector<std::byte> bytes(bytes_of(specs[i]));
      const auto located = from.find(specs[i].name);
      convert_elements(located.entry->dtype, located.bytes().data(), specs[i].dtype, bytes.data(),
                       elements_of(specs[i]));
      writer.append(i, bytes);
    }
    writer.finish();
    put_file(folder / "mixed/config.json", get_file(fixture(name) + "/config.json"));
    const Loaded model(folder / "mixed", hf_folder_dtype(folder / "mixed"));
    save_hf_model(folder / "again", model.config, model.state, elements_in(model.storage), kOneFile,
                  {.dtypes_from = folder / "mixed"});
    EXPECT_EQ(get_file(folder / "again/model.safetensors"),
              get_file(folder / "mixed/model.safetensors"));
  }
}

TEST(HfWeights, TheMainTypeOfAFolderIsThatOfMostElements) {
  const TempFolder folder;
  const auto main_type = [&](int64_t wide, int64_t narrow, FileDType other) {
    const std::vector<TensorSpec> specs = {{"a", FileDType::f32, {wide}},
                                           {"b", FileDType::bf16, {narrow}},
                                           {"c", other, {100}},
                                           {"d.weight_scale_inv", FileDType::f32, {100}}};
    const std::string path = folder / (std::to_string(wide) + std::string(name_of(other)));
    const Disk disk;
    SafetensorsFolderWriter writer(disk, path, specs, uint64_t{1} << 30);
    for (size_t i = 0; i < specs.size(); ++i) {
      writer.append(i, std::vector<std::byte>(bytes_of(specs[i])));
    }
    writer.finish();
    return hf_folder_main_dtype(path);
  };
  EXPECT_EQ(main_type(5, 4, FileDType::f8e4m3), FileDType::f32);
  EXPECT_EQ(main_type(4, 5, FileDType::f8e4m3), FileDType::bf16);
  EXPECT_EQ(main_type(4, 5, FileDType::u8), FileDType::bf16);
  EXPECT_EQ(main_type(4, 5, FileDType::f16), FileDType::f16);
}

// Master weights of a model that is trained on get the value itself, not the rounded one.
TEST(HfWeights, MasterWeightsAreNotRounded) {
  const Loaded exact(fixture("mixtral"), DType::f32);
  const ModelState state = declare_model_state(exact.config, DType::bf16, /*trained=*/true);
  const StateStorage storage(state.table);
  load_hf_weights(fixture("mixtral"), exact.config, state, storage);
  for (const Parameter& parameter : state.parameters) {
    const TensorView from = exact.storage.view(exact.state.parameters[parameter.number()].value);
    for (int64_t i = 0; i < from.shape.elements(); ++i) {
      const StateId exact_id = parameter.master.valid() ? parameter.master : parameter.value;
      ASSERT_EQ(storage.view(exact_id).as<float>()[i], from.as<float>()[i]);
    }
  }
}

// A model that is continued with other options may fit another architecture by name than its
// folder's; the folder's tensors keep their names.
TEST(HfWeights, NamesAreThoseOfTheFolder) {
  const Loaded exact(fixture("mixtral"), DType::f32);
  ModelConfig changed = exact.config;
  changed.moe_router_pre_softmax = true;
  changed.hf_architecture = fitting_hf_architecture(changed);
  EXPECT_NE(changed.hf_architecture, exact.config.hf_architecture);
  for (const std::string& architecture : {changed.hf_architecture, std::string()}) {
    changed.hf_architecture = architecture;
    const ModelState state = declare_model_state(changed, DType::f32, /*trained=*/false);
    const StateStorage storage(state.table);
    load_hf_weights(fixture("mixtral"), changed, state, storage);
    for (const Parameter& parameter : state.parameters) {
      const TensorView view = storage.view(parameter.value);
      EXPECT_EQ(std::memcmp(view.data, exact.storage.view(parameter.value).data,
                            static_cast<size_t>(view.shape.elements()) * sizeof(float)),
                0);
    }
  }
}

// A folder with the tensors of a fixture, changed.
class ChangedFolder : public ::testing::Test {
 protected:
  struct Tensor {
    TensorSpec spec;
    std::vector<std::byte> bytes;
  };
  explicit ChangedFolder(const char* name = "mixtral") : name(name) {
    const SafetensorsFolder from = SafetensorsFolder::open(fixture(name));
    for (const SafetensorsFile& file : from.files()) {
      for (const TensorEntry& entry : file.entries()) {
        const auto bytes = file.bytes(entry);
        tensors.push_back({entry, {bytes.begin(), bytes.end()}});
      }
    }
  }
  Tensor& find(const std::string& wanted) {
    for (Tensor& tensor : tensors) {
      if (tensor.spec.name == wanted) return tensor;
    }
    ADD_FAILURE() << "no " << wanted;
    return tensors.front();
  }
  Loaded load() const {
    std::vector<TensorSpec> specs;
    for (const Tensor& tensor : tensors) specs.push_back(tensor.spec);
    const Disk disk;
    SafetensorsFolderWriter writer(disk, folder.path(), specs, 1 << 30);
    for (size_t i = 0; i < tensors.size(); ++i) writer.append(i, tensors[i].bytes);
    writer.finish();
    put_file(folder / "config.json", get_file(fixture(name) + "/config.json"));
    return Loaded(folder.path(), DType::f32);
  }
  void expect_refused(const std::vector<std::string>& phrases) const {
    const std::string message = message_of(ExitStatus::bad_request, [&] { load(); });
    for (const std::string& phrase : phrases) expect_phrase(message, phrase);
    expect_phrase(message, folder.path());
  }

  std::string name;
  TempFolder folder;
  std::vector<Tensor> tensors;
};

constexpr const char* kExpert = "model.layers.1.block_sparse_moe.experts.5.w2.weight";

TEST_F(ChangedFolder, UnchangedItLoads) {
  EXPECT_NO_THROW(load());
}

TEST_F(ChangedFolder, MissingTensor) {
  std::erase_if(tensors, [](const Tensor& tensor) { return tensor.spec.name == kExpert; });
  expect_refused({kExpert, "is missing"});
}

TEST_F(ChangedFolder, UnexpectedTensor) {
  tensors.push_back({{"model.layers.2.input_layernorm.weight", FileDType::f32, {48}},
                     std::vector<std::byte>(48 * 4)});
  expect_refused({"model.layers.2.input_layernorm.weight", "has no place", "MixtralForCausalLM"});
}

TEST_F(ChangedFolder, WrongShape) {
  Tensor& tensor = find(kExpert);
  tensor.spec.shape = {24, 96};
  expect_refused({kExpert, "has the shape [24, 96]", "[48, 48]"});
}

TEST_F(ChangedFolder, WrongType) {
  find(kExpert).spec.dtype = FileDType::i32;
  expect_refused({kExpert, "I32"});
}

TEST_F(ChangedFolder, ValuesThatAreNotFinite) {
  const auto value = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(&find(kExpert).bytes[4 * 17], &value, sizeof value);
  const std::string message = message_of(ExitStatus::failed, [&] { load(); });
  expect_phrase(message, kExpert);
  expect_phrase(message, "not finite as f32 at element 17 of ");
  expect_phrase(message, folder.path());
}

TEST_F(ChangedFolder, HeadOfAModelThatIsNotTied) {
  std::erase_if(tensors, [](const Tensor& tensor) { return tensor.spec.name == "lm_head.weight"; });
  expect_refused({"lm_head.weight", "is missing"});
}

class TiedFolder : public ChangedFolder {
 protected:
  TiedFolder() : ChangedFolder("mixtral_window_tied") {}
};

// Some programs write the tied head a second time.
TEST_F(TiedFolder, CopyOfTheHeadIsLeftOut) {
  Tensor copy = find("model.embed_tokens.weight");
  copy.spec.name = "lm_head.weight";
  tensors.push_back(copy);
  EXPECT_NO_THROW(load());
}

// A head with other weights is no copy: the model would compute something else.
TEST_F(TiedFolder, AnotherHeadIsRefused) {
  Tensor other = find("model.embed_tokens.weight");
  other.spec.name = "lm_head.weight";
  other.bytes[0] ^= std::byte{1};
  tensors.push_back(other);
  expect_refused({"lm_head.weight"});
}

}  // namespace
}  // namespace troupe
