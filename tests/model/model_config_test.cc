// Model shapes: parameter counts of published models, the flops formula on a case worked out by
// hand, and what is refused.
#include "model/model_config.h"

#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "io/hf_config.h"
#include "model/parameters.h"
#include "program/test_models.h"

namespace troupe {
namespace {

using namespace testing;

// config.json of mistralai/Mixtral-8x7B-v0.1.
constexpr const char* kMixtral8x7b = R"({
  "architectures": ["MixtralForCausalLM"],
  "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
  "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-05,
  "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
  "use_cache": true, "vocab_size": 32000
})";

// config.json of Qwen/Qwen3-30B-A3B.
constexpr const char* kQwen3_30bA3b = R"({
  "architectures": ["Qwen3MoeForCausalLM"],
  "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
  "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
  "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
  "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
  "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936
})";

int64_t declared_elements(const ModelConfig& config) {
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
  int64_t elements = 0;
  for (const Parameter& parameter : state.parameters) {
    elements += (*state.table)[parameter.value].shape.elements();
  }
  return elements;
}

TEST(ParameterCount, Mixtral8x7b) {
  const ModelConfig config = parse_hf_config(kMixtral8x7b, "config.json");
  EXPECT_EQ(Model(config).parameter_count(), 46'702'792'704);
  // Six of the eight experts of each layer (three matrices of 4096 x 14336) are left out.
  EXPECT_EQ(Model(config).active_parameter_count(),
            46'702'792'704 - int64_t{32} * 6 * 3 * 4096 * 14336);
  EXPECT_EQ(declared_elements(config), Model(config).parameter_count());
}

TEST(ParameterCount, Qwen3_30bA3b) {
  const ModelConfig config = parse_hf_config(kQwen3_30bA3b, "config.json");
  EXPECT_EQ(Model(config).parameter_count(), 30'532'122'624);
  EXPECT_EQ(Model(config).active_parameter_count(),
            30'532'122'624 - int64_t{48} * 120 * 3 * 2048 * 768);
  EXPECT_EQ(declared_elements(config), Model(config).parameter_count());
}

// The shipped configurations against what their makers have published: the exact number of weights
// where the hub's index of the checkpoint states it, and the rounded figures of the announcements
// (Mixtral 8x7B: 46.7 and 12.9 billion, 8x22B: 141 and 39; Qwen2-57B-A14B: 57.4 and 14.2;
// Qwen3: 30.5 and 3.3, 235 and 22; Qwen3-Next: 80 and 3; Qwen3.5: 35 and 3; OLMoE: 6.9 and 1.3;
// DeepSeek-V2: 236 and 21, Lite 15.7 and 2.4, V3: 671 and 37; GPT-OSS: 20.9 and 3.6, 116.8 and 5.1;
// Kimi-K2: 1026 and 32; Moonlight: 16 and 3; MiniMax-M2: 230, which is rounded to tens, and 10;
// Ling-mini-2.0: 16 and 1.4, Ling-flash-2.0: 100, which is rounded to tens, and 6.1).
TEST(ParameterCount, ShippedConfigurations) {
  struct Published {
    const char* name;
    double billions;
    double active_billions;
    double rounding;  // half a unit of the last published digit
    double active_rounding;
    int64_t exact;     // 0: not published
    int left_out = 0;  // of embedding and head, of the active ones, as some publish them
  };
  for (const Published& model : {Published{"mixtral-8x7b", 46.7, 12.9, 0.05, 0.05, 46'702'792'704},
                                 Published{"mixtral-8x22b", 141, 39, 0.5, 0.5, 140'620'634'112},
                                 Published{"qwen2-57b-a14b", 57.4, 14.2, 0.05, 0.05, 0},
                                 Published{"qwen3-30b-a3b", 30.5, 3.3, 0.05, 0.06, 30'532'122'624},
                                 Published{"qwen3-235b-a22b", 235, 22, 0.5, 0.5, 235'093'634'560},
                                 Published{"qwen3-next-80b-a3b", 80, 3, 0.5, 0.5, 0, 2},
                                 Published{"qwen3.5-35b-a3b", 35, 3, 0.5, 0.5, 0, 1},
                                 Published{"olmoe-1b-7b", 6.9, 1.3, 0.05, 0.05, 6'919'161'856},
                                 Published{"deepseek-v2-lite", 15.7, 2.4, 0.05, 0.06, 0, 1},
                                 Published{"deepseek-v2", 236, 21, 0.5, 0.5, 0, 1},
                                 Published{"deepseek-v3", 671, 37, 0.5, 0.5, 0, 1},
                                 Published{"gpt-oss-20b", 20.9, 3.6, 0.05, 0.05, 0, 1},
                                 Published{"gpt-oss-120b", 116.8, 5.1, 0.05, 0.06, 0, 1},
                                 Published{"minimax-m2", 230, 10, 5, 0.5, 0, 1},
                                 Published{"ling-mini-2.0", 16, 1.4, 0.5, 0.06, 0, 0},
                                 Published{"ling-flash-2.0", 100, 6.1, 5, 0.1, 0, 0},
                                 Published{"kimi-k2", 1026, 32, 1, 0.5, 0, 1},
                                 Published{"moonlight-16b-a3b", 16, 3, 0.5, 0.5, 0, 1}}) {
    SCOPED_TRACE(model.name);
    const ModelConfig config =
        read_hf_config(std::string(TROUPE_SOURCE_DIR "/configs/") + model.name + ".json");
    const auto billions = static_cast<double>(Model(config).parameter_count()) / 1e9;
    const double left_out = double(config.vocab_size) * config.hidden_size * model.left_out;
    const auto active =
        (static_cast<double>(Model(config).active_parameter_count()) - left_out) / 1e9;
    EXPECT_NEAR(billions, model.billions, model.rounding);
    EXPECT_NEAR(active, model.active_billions, model.active_rounding);
    if (model.exact != 0) {
      EXPECT_EQ(Model(config).parameter_count(), model.exact);
    }
    EXPECT_EQ(declared_elements(config), Model(config).parameter_count());
  }
}

// GLM-4.5 is published with 355 billion weights, of which 32 are active, and GLM-4.5-Air with 106
// and 12, all without embedding and head, the first with its layer of multi-token prediction.
TEST(ParameterCount, Glm45) {
  const auto config_of = [](const std::string& name) {
    return read_hf_config(TROUPE_SOURCE_DIR "/configs/" + name + ".json");
  };
  const auto billions = [](int64_t elements, const ModelConfig& config) {
    return static_cast<double>(elements - 2 * int64_t{config.vocab_size} * config.hidden_size) /
           1e9;
  };
  ModelConfig config = config_of("glm-4.5");
  ModelConfig air = config_of("glm-4.5-air");
  // Attention with biases: 96 heads of 128 and 8 of keys and of values, here with two norms of 128.
  const int64_t attention =
      int64_t{5120} * 128 * 112 + 128 * 112 + 96 * 128 * int64_t{5120} + 2 * 128;
  const int64_t expert = 3 * int64_t{5120} * 1536;
  const int64_t experts = 161 * expert + 160 * 5120;
  const int64_t elements = 2 * int64_t{151552} * 5120 + 5120 + 92 * (attention + 2 * 5120) +
                           3 * (3 * int64_t{5120} * 12288) + 89 * experts;
  EXPECT_EQ(Model(config).parameter_count(), elements);
  EXPECT_EQ(Model(config).active_parameter_count(), elements - 89 * 152 * expert);
  EXPECT_NEAR(billions(Model(config).active_parameter_count(), config), 32, 0.5);
  EXPECT_EQ(declared_elements(config), elements);
  config.mtp_num_layers = 1;
  EXPECT_EQ(Model(config).parameter_count(),
            elements + attention + 2 * 5120 + experts + 2 * int64_t{5120} * 5120 + 3 * 5120);
  EXPECT_NEAR(billions(Model(config).parameter_count(), config), 355, 0.5);

  const int64_t air_attention = int64_t{4096} * 128 * 112 + 128 * 112 + 96 * 128 * int64_t{4096};
  const int64_t air_expert = 3 * int64_t{4096} * 1408;
  const int64_t air_elements = 2 * int64_t{151552} * 4096 + 4096 + 46 * (air_attention + 2 * 4096) +
                               3 * int64_t{4096} * 10944 + 45 * (129 * air_expert + 128 * 4096);
  EXPECT_EQ(Model(air).parameter_count(), air_elements);
  EXPECT_EQ(Model(air).active_parameter_count(), air_elements - 45 * 120 * air_expert);
  EXPECT_NEAR(billions(Model(air).parameter_count(), air), 106, 0.5);
  EXPECT_NEAR(billions(Model(air).active_parameter_count(), air), 12, 0.5);
  EXPECT_EQ(declared_elements(air), air_elements);
}

// DeepSeek-V3 with an indexer in each layer: 64 heads of 128 of the queries' latent of 1,536, a key
// of 128 and 64 weights of the hidden state of 7,168, and the gain and shift of the key's norm.
TEST(ParameterCount, DeepseekV32IsDeepseekV3WithIndexers) {
  const auto count = [](const std::string& name) {
    return Model(read_hf_config(TROUPE_SOURCE_DIR "/configs/" + name + ".json")).parameter_count();
  };
  const int64_t indexer = int64_t{64} * 128 * 1536 + int64_t{7168} * (128 + 64) + 2 * 128;
  EXPECT_EQ(count("deepseek-v3.2"), count("deepseek-v3") + 61 * indexer);
}

TEST(ParameterCount, EqualsWhatIsDeclared) {
  ModelConfig mixed = moe_model(4);
  mixed.moe_layers = {false, true, false, true};
  mixed.ffn_hidden_size = 40;
  mixed.tie_embeddings = true;
  mixed.qk_layernorm = true;
  ModelConfig biased = mixed;
  biased.normalization = Normalization::layer_norm;
  biased.add_qkv_bias = true;
  biased.add_bias_linear = true;
  biased.gated_linear_unit = false;
  biased.activation = ActivationFunction::squared_relu;
  biased.qk_norm_scope = QkNormScope::projection;
  biased.moe_shared_expert_intermediate_size = 12;
  biased.moe_shared_expert_gate = true;
  for (const ModelConfig& config :
       {dense_model(3), moe_model(2), mixtral_like_model(2), mixed, biased}) {
    EXPECT_EQ(declared_elements(config), Model(config).parameter_count());
  }
  const Model dense(dense_model(3));
  EXPECT_EQ(dense.active_parameter_count(), dense.parameter_count());
}

// 3 times (backward costs twice the forward) 2 flops per multiply-add of: the head, 5 x 7; in each
// layer the projections, 5 x (4 + 4 + 4) to queries, keys and values of 2 heads of 2 in 2 groups
// and 4 x 5 back; the MLP, three matrices of 5 x 6 in the dense layer and of 5 x 3 in each of the
// two experts of the other; and attention, where a token of a sequence of n sees n / 2 others on
// average, with 2 products of 4 for each.
TEST(TrainingFlops, WorkedOutByHand) {
  ModelConfig config;
  config.vocab_size = 7;
  config.hidden_size = 5;
  config.num_layers = 2;
  config.num_attention_heads = 2;
  config.num_query_groups = 2;
  config.kv_channels = 2;
  config.max_position_embeddings = 16;
  config.ffn_hidden_size = 6;
  config.num_experts = 4;
  config.moe_router_topk = 2;
  config.moe_ffn_hidden_size = 3;
  config.moe_layers = {false, true};
  config.validate();
  const double layers = 2 * (5 * 12 + 4 * 5) + 3 * 5 * 6 + 2 * 3 * 5 * 3;
  for (const int64_t n : {1, 8, 16}) {
    const auto tokens = static_cast<double>(n);
    const double attention = 2 /* layers */ * tokens * (tokens / 2) * 2 * 4;
    EXPECT_DOUBLE_EQ(Model(config).training_flops(n), 3 * 2 * (tokens * (35 + layers) + attention));
  }
  EXPECT_DOUBLE_EQ(Model(config).training_flops(1), 6.0 * (35 + 160 + 90 + 90 + 8));
  // A shared expert is three matrices of 5 x 2 more; without gates every MLP has two.
  config.moe_shared_expert_intermediate_size = 2;
  EXPECT_DOUBLE_EQ(Model(config).training_flops(1), 6.0 * (35 + 160 + 90 + 90 + 30 + 8));
  config.gated_linear_unit = false;
  EXPECT_DOUBLE_EQ(Model(config).training_flops(1), 6.0 * (35 + 160 + 60 + 60 + 20 + 8));
}

// Attention costs as many pairs as keys are chosen: as dense attention where these are all. What
// the indexer adds are its projections and, of half of all pairs, one product.
TEST(TrainingFlops, FallWithTheChosenKeys) {
  ModelConfig config =
      read_hf_config(std::string(TROUPE_SOURCE_DIR "/configs/") + "deepseek-v3.2.json");
  const auto flops = [&](int32_t top_k, int64_t sequence) {
    config.dsa_indexer_topk = top_k;
    return Model(config).training_flops(sequence);
  };
  const auto dense = [&](int64_t sequence) {
    ModelConfig all = config;
    all.dsa_indexer_topk = 0;
    return Model(all).training_flops(sequence);
  };
  const double n = 8192;
  const double indexer = 6 * n * 61 * (64.0 * 128 * 1536 + 7168.0 * (128 + 64) + n / 2 * 64 * 128);
  EXPECT_NEAR(flops(8192, 8192) / (dense(8192) + indexer), 1, 1e-12);
  const double attention = 6 * n * n / 2 * 61 * 128 * (192 + 128);
  const double pairs = 2048 * n - 2048.0 * 2047 / 2;
  const double share = pairs / (n * (n + 1) / 2);
  EXPECT_NEAR(flops(2048, 8192) / (dense(8192) + indexer - (1 - share) * attention), 1, 1e-12);
}

// For long models 6 flops per active weight and token is the common estimate. Norms and routers
// cost nothing here, the embedding is a look-up, and attention comes on top.
TEST(TrainingFlops, AreAboutSixPerActiveWeight) {
  const ModelConfig config = parse_hf_config(kMixtral8x7b, "config.json");
  const double estimate = 6.0 * static_cast<double>(Model(config).active_parameter_count());
  EXPECT_NEAR(Model(config).training_flops(1) / estimate, 1.0, 0.02);
  EXPECT_GT(Model(config).training_flops(8192) / 8192, estimate);
}

class Refusals : public ::testing::Test {
 protected:
  // Refuses `config` with a message that names `field`.
  void expect_refused(const std::string& field) {
    try {
      config.validate();
      ADD_FAILURE() << "nothing was refused: " << field;
    } catch (const UserError& error) {
      EXPECT_EQ(error.status(), ExitStatus::bad_request);
      EXPECT_NE(std::string(error.what()).find(field), std::string::npos) << error.what();
    }
    config = moe_model(2);
  }
  ModelConfig config = moe_model(2);
};

TEST_F(Refusals, GoodShapesPass) {
  EXPECT_NO_THROW(config.validate());
  EXPECT_NO_THROW(dense_model(1).validate());
}

TEST_F(Refusals, SparseAttentionThatCannotBe) {
  const auto sparse = [&] {
    config = moe_model(2);
    set_latent_attention(config);
    config.dsa_indexer_topk = 4;
    config.dsa_indexer_n_heads = 2;
    config.dsa_indexer_head_dim = 8;
  };
  sparse();
  EXPECT_NO_THROW(config.validate());
  config.dsa_indexer_n_heads = 0;
  expect_refused("dsa_indexer_n_heads");
  sparse();
  config.dsa_indexer_head_dim = 4;
  expect_refused("dsa_indexer_head_dim");
  sparse();
  config.q_lora_rank = 0;
  expect_refused("needs multi_latent_attention and q_lora_rank");
  sparse();
  config.attention_dropout = 0.1;
  expect_refused("sparse attention has no attention_dropout");
  sparse();
  config.dsa_indexer_n_heads = config.dsa_indexer_head_dim = 1 << 20;
  expect_refused("make a projection that is too large");
  config.dsa_indexer_topk = 4;
  config.dsa_indexer_n_heads = 2;
  config.dsa_indexer_head_dim = 8;
  expect_refused("multi_latent_attention");
}

TEST_F(Refusals, SizesThatAreNotPositive) {
  for (const int32_t size : {0, -1}) {
    config.vocab_size = size;
    expect_refused("vocab_size");
    config.hidden_size = size;
    expect_refused("hidden_size");
    config.num_layers = size;
    expect_refused("num_layers");
    config.num_attention_heads = size;
    expect_refused("num_attention_heads");
    config.num_query_groups = size;
    expect_refused("num_query_groups");
    config.kv_channels = size;
    expect_refused("kv_channels");
    config.max_position_embeddings = size;
    expect_refused("max_position_embeddings");
    config.moe_router_topk = size;
    expect_refused("moe_router_topk");
    config.moe_ffn_hidden_size = size;
    expect_refused("moe_ffn_hidden_size");
  }
  config = dense_model(1);
  config.ffn_hidden_size = 0;
  expect_refused("ffn_hidden_size");
  config.moe_layers = {true, false};
  expect_refused("ffn_hidden_size");
}

TEST_F(Refusals, SizesThatCannotBeMeant) {
  config.vocab_size = 2'000'000'000;
  expect_refused("vocab_size");
  config.hidden_size = 2'000'000'000;
  expect_refused("hidden_size");
  config.num_layers = 10'001;
  expect_refused("num_layers");
  config.moe_ffn_hidden_size = 1 << 25;
  expect_refused("moe_ffn_hidden_size");
}

// Each of the two may be meant; their product has more than 31 bits.
TEST_F(Refusals, SizesWhoseProductCannotBeMeant) {
  config.num_attention_heads = 1 << 20;
  config.num_query_groups = 1 << 20;
  config.kv_channels = 1 << 20;
  expect_refused("kv_channels");
}

TEST_F(Refusals, SizesThatDoNotFitTogether) {
  config.num_query_groups = 3;
  expect_refused("num_query_groups (3)");
  config.kv_channels = 7;
  expect_refused("must be even and at least 2: it is 7 of the head size 7");
  config.num_experts = -1;
  expect_refused("num_experts must not be negative");
  config.moe_router_topk = 5;
  expect_refused("moe_router_topk (5) is larger than num_experts (4)");
  config.moe_router_topk = 1;
  config.sliding_window = -1;
  expect_refused("sliding_window");
}

TEST_F(Refusals, MoreExpertsThanTheChosenGroupsHave) {
  const auto grouped = [&](int32_t top_k) {
    config.num_experts = 8;
    config.moe_router_num_groups = 4;
    config.moe_router_group_topk = 2;
    config.moe_router_topk = top_k;
  };
  grouped(4);
  EXPECT_NO_THROW(config.validate());
  grouped(5);
  expect_refused(
      "moe_router_topk (5) must be at least moe_router_group_topk (2) and at most the 4");
  grouped(1);
  expect_refused(
      "moe_router_topk (1) must be at least moe_router_group_topk (2) and at most the 4");
}

// A possible shape, in which flags beside it may make the router learn.
TEST_F(Refusals, ARouterThatCannotLearnIsJudgedApart) {
  config = moe_model(2);
  config.moe_router_topk = 1;
  config.moe_router_pre_softmax = false;
  config.validate();
  EXPECT_THROW(config.require_learning_router(), UserError);
  config.moe_router_sinkhorn = true;
  config.require_learning_router();
  config.moe_router_sinkhorn = false;
  config.moe_router_pre_softmax = true;
  config.require_learning_router();
}

TEST_F(Refusals, PartsThatDoNotGoTogether) {
  config.moe_shared_expert_gate = true;
  expect_refused("moe_shared_expert_gate needs moe_shared_expert_intermediate_size");
  config.attention_output_gate = config.add_qkv_bias = true;
  expect_refused("attention_output_gate has no biases");
  config.init_method_xavier_uniform = config.add_bias_linear = true;
  expect_refused("init_method_xavier_uniform has no rule for the bias of a router");
  config.attention_sinks = config.zero_attention_sinks = true;
  expect_refused("attention_sinks are learned, or zero");
  config.qk_l2_norm = config.qk_layernorm = true;
  expect_refused("qk_l2_norm and qk_layernorm are two kinds");
  config.window_layers = {true, false};
  expect_refused("window_layers needs sliding_window");
  config.gated_linear_unit = false;
  config.activation_clamp = 7;
  expect_refused("activation_clamp and glu_linear_offset belong to gated linear units");
  config.gated_linear_unit = false;
  config.glu_linear_offset = 1;
  expect_refused("activation_clamp and glu_linear_offset belong to gated linear units");
}

TEST_F(Refusals, RoutersThatCannotBe) {
  config.moe_router_group_scores = 1;
  expect_refused("moe_router_group_scores needs moe_router_num_groups");
  for (double ModelConfig::*loss :
       {&ModelConfig::moe_aux_loss_coeff, &ModelConfig::moe_seq_aux_loss_coeff,
        &ModelConfig::moe_global_aux_loss_coeff}) {
    config.moe_aux_loss_coeff = 0;
    config.moe_router_sinkhorn = true;
    config.*loss = 0.1;
    expect_refused("sinkhorn routing balances by itself");
  }
  config.moe_router_force_biased = std::numeric_limits<double>::infinity();
  expect_refused("moe_router_force_biased must be finite");
  for (const int32_t multiple : {0, 4097}) {
    config.moe_expert_row_multiple = multiple;
    expect_refused("moe_expert_row_multiple must be between 1 and 4096");
  }
  config.moe_expert_row_multiple = 2;
  config.moe_pad_expert_input_to_capacity = true;
  config.moe_expert_capacity_factor = 1;
  expect_refused("rows are padded either to the capacity or to a multiple");
}

TEST_F(Refusals, GroupsOfExpertsThatCannotBe) {
  const auto grouped = [&](int32_t groups, int32_t chosen, int32_t scores) {
    config.num_experts = 8;
    config.moe_router_topk = 2;
    config.moe_router_num_groups = groups;
    config.moe_router_group_topk = chosen;
    config.moe_router_group_scores = scores;
  };
  grouped(4, 2, 2);
  EXPECT_NO_THROW(config.validate());
  const std::string together = "moe_router_num_groups and moe_router_group_topk go together";
  for (const auto& [groups, chosen] : {std::pair(0, 1), {4, 0}, {-1, 1}, {4, -1}, {-1, -1}}) {
    grouped(groups, chosen, 0);
    expect_refused(together);
  }
  grouped(3, 1, 1);
  expect_refused("num_experts (8) must be a multiple of moe_router_num_groups (3)");
  grouped(2, 3, 1);
  expect_refused("moe_router_group_topk (3) is larger than moe_router_num_groups (2)");
  for (const int32_t scores : {-1, 3}) {
    grouped(4, 2, scores);
    expect_refused("must be at most the 2 experts of a group");
  }
}

TEST_F(Refusals, RoutersWhoseScoresDoNotFit) {
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
    config.moe_router_topk_scaling_factor = factor;
    expect_refused("moe_router_topk_scaling_factor must be positive, it is ");
  }
  config.moe_router_enable_expert_bias = true;
  expect_refused("moe_router_enable_expert_bias needs the score function sigmoid");
  config.moe_router_enable_expert_bias = true;
  config.moe_router_score_function = ScoreFunction::sigmoid;
  EXPECT_NO_THROW(config.validate());
  config.moe_router_sinkhorn = true;
  config.moe_router_enable_expert_bias = false;
  expect_refused("sinkhorn routing has no groups, no expert bias and no other score function");
  config.moe_aux_loss_coeff = 0;
  config.moe_router_sinkhorn = true;
  EXPECT_NO_THROW(config.validate());
  config.moe_expert_capacity_factor = 1;
  expect_refused("sinkhorn routing does not go together with moe_expert_capacity_factor");
  config.moe_pad_expert_input_to_capacity = true;
  expect_refused("moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor");
}

TEST_F(Refusals, DeltaNetsThatCannotBe) {
  const auto linear = [&] {
    config = moe_model(2);
    config.linear_attention_layers = {true, false};
    config.linear_conv_kernel_dim = 4;
    config.linear_num_key_heads = 2;
    config.linear_num_value_heads = 4;
    config.linear_key_head_dim = config.linear_value_head_dim = 8;
  };
  linear();
  EXPECT_NO_THROW(config.validate());
  config.linear_conv_kernel_dim = 1 << 10;
  expect_refused("linear_conv_kernel_dim (1024) must be at most ");
  linear();
  config.linear_num_value_heads = 3;
  expect_refused("linear_num_value_heads (3) must be a multiple of linear_num_key_heads (2)");
  linear();
  set_latent_attention(config);
  config.dsa_indexer_topk = 4;
  config.dsa_indexer_n_heads = 2;
  config.dsa_indexer_head_dim = 8;
  expect_refused("sparse attention and linear_attention_layers do not go together");
}

TEST_F(Refusals, LatentAttentionThatCannotBe) {
  config.rotary_interleaved = true;
  expect_refused("rotary_interleaved is made for multi_latent_attention only");
  const auto latent = [&] {
    config = moe_model(2);
    set_latent_attention(config);
  };
  latent();
  config.rotary_percent = 0.5;
  expect_refused("multi_latent_attention has no rotary_percent");
  const std::vector<std::pair<bool ModelConfig::*, std::string>> parts = {
      {&ModelConfig::qk_l2_norm, "qk_l2_norm"},
      {&ModelConfig::attention_sinks, "attention_sinks"},
      {&ModelConfig::zero_attention_sinks, "zero_attention_sinks"},
      {&ModelConfig::attention_output_gate, "attention_output_gate"},
      {&ModelConfig::add_qkv_bias, "add_qkv_bias"},
      {&ModelConfig::add_bias_linear, "biases (disable_bias_linear)"}};
  for (const auto& [part, name] : parts) {
    latent();
    config.*part = true;
    // Queries and keys of such models may have norms, which exclude qk_l2_norm by themselves.
    config.qk_layernorm = config.qk_layernorm && !config.qk_l2_norm;
    expect_refused("multi_latent_attention has no " + name + ".");
  }
  latent();
  config.sliding_window = 4;
  expect_refused("multi_latent_attention has no sliding_window.");
  latent();
  config.kv_channels += 2;
  expect_refused("kv_channels");
  for (int32_t ModelConfig::*size : {&ModelConfig::kv_lora_rank, &ModelConfig::qk_head_dim,
                                     &ModelConfig::qk_pos_emb_head_dim, &ModelConfig::v_head_dim}) {
    latent();
    config.*size = 0;
    expect_refused("must be positive");
  }
  latent();
  config.num_query_groups = 1;
  expect_refused("multi_latent_attention has no groups of queries");
}

// Of llama3 the two ends of the range lie apart; of yarn they may meet.
TEST_F(Refusals, RangesOfStretchedPositionsThatCannotBe) {
  for (const RopeScalingKind kind : {RopeScalingKind::llama3, RopeScalingKind::yarn}) {
    const bool is_yarn = kind == RopeScalingKind::yarn;
    const auto stretch = [&](double slow, double fast) {
      config.rope_scaling_type = kind;
      config.rope_scaling_factor = 8;
      config.rope_original_positions = 16;
      config.rope_scaling_slow = slow;
      config.rope_scaling_fast = fast;
    };
    stretch(1, 1.5);
    EXPECT_NO_THROW(config.validate());
    stretch(2, 2);
    if (is_yarn) {
      EXPECT_NO_THROW(config.validate());
    } else {
      expect_refused(
          "rope_scaling_slow (2) must be positive, and rope_scaling_fast (2) larger than");
    }
    stretch(2, 1.5);
    expect_refused(is_yarn ? "rope_scaling_fast (1.5) at least it" : "(1.5) larger than it");
    stretch(0, 1);
    expect_refused("rope_scaling_slow (0) must be positive");
    stretch(1, std::numeric_limits<double>::infinity());
    expect_refused("rope_scaling_fast (inf)");
    stretch(1, 2);
    config.rope_original_positions = 0;
    expect_refused("rope_original_positions must be positive");
  }
}

TEST_F(Refusals, NumbersThatMakeNoSense) {
  for (const int32_t depths : {-1, 101}) {
    config.mtp_num_layers = depths;
    expect_refused("mtp_num_layers must be between 0 and 100");
  }
  config.num_layers = 2001;
  expect_refused("num_layers is 2001, more than 2000");
  for (const int32_t token : {-2, config.vocab_size}) {
    config.padding_token = token;
    expect_refused("padding_token");
  }
  config.embedding_init_method_std = std::numeric_limits<double>::infinity();
  expect_refused("embedding_init_method_std");
  config.mtp_loss_scaling_factor = -0.1;
  expect_refused("mtp_loss_scaling_factor");
  config.activation_clamp = -1;
  expect_refused("activation_clamp");
  for (const double probability : {-0.1, 1.0}) {
    config.hidden_dropout = probability;
    expect_refused("hidden_dropout");
    config.attention_dropout = probability;
    expect_refused("attention_dropout");
  }

  config.norm_epsilon = 0;
  expect_refused("norm_epsilon");
  config.norm_epsilon = -1e-6;
  expect_refused("norm_epsilon");
  config.rotary_base = 1;
  expect_refused("rotary_base");
  config.rope_scaling_factor = 0;
  expect_refused("rope_scaling_factor");
  config.rope_mscale = -0.1;
  expect_refused("rope_mscale must");
  config.rope_mscale_all_dim = -0.1;
  expect_refused("rope_mscale_all_dim");
  config.rope_attention_factor = -0.1;
  expect_refused("rope_attention_factor");
  config.moe_aux_loss_coeff = -0.01;
  expect_refused("moe_aux_loss_coeff");
  config.moe_z_loss_coeff = -0.01;
  expect_refused("moe_z_loss_coeff");
  config.init_method_std = -0.02;
  expect_refused("init_method_std");
}

}  // namespace
}  // namespace troupe
