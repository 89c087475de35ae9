// From options to the model's shape and the step: where --model is looked for, what the flags
// change, and what is refused.
#include "options/model_options.h"

#include <cmath>
#include <filesystem>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "io/hf_config.h"
#include "io/model_config_json.h"
#include "model/blocks/dense_mlp.h"
#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "optimizer/adamw_optimizer.h"
#include "options/command_line.h"
#include "options/layout_options.h"
#include "program/test_models.h"
#include "support/errors.h"
#include "support/files.h"

namespace troupe {
namespace {

using namespace testing;

class ModelOptions : public ::testing::Test {
 protected:
  ModelOptions() {
    ModelConfig config = mixtral_like_model(2);
    config.moe_z_loss_coeff = 0;
    config.hf_architecture = "MixtralForCausalLM";
    put_file(folder / "config.json", write_hf_config(config));
    options.command = Command::train;
    options.model = folder.path();
  }

  // The message of the bad request that `body` must end in.
  template <class Body>
  static std::string refusal(const Body& body) {
    return message_of(ExitStatus::bad_request, body);
  }
  std::string refused_model() {
    return refusal([this] { load_model_config(options); });
  }
  // What the command line says about the model in the folder.
  Options parsed_flags(const std::string& flags) const {
    std::vector<std::string> arguments = {"inspect", "--model", folder.path()};
    std::istringstream words(flags);
    for (std::string word; words >> word;) arguments.push_back(word);
    return parse_command_line(arguments).options;
  }
  static void expect_part(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
  }

  TempFolder folder;
  Options options;
};

TEST_F(ModelOptions, ReadsAFolderOrAFile) {
  EXPECT_EQ(load_model_config(options).hidden_size, 128);
  options.model = folder / "config.json";
  EXPECT_EQ(load_model_config(options).num_experts, 8);
}

TEST_F(ModelOptions, RefusesWhatDoesNotExist) {
  options.model = "no_such_model";
  expect_part(refused_model(), "\"no_such_model\": there is no such file or folder");
  options.model = "";
  expect_part(refused_model(), "--model is missing");
  std::filesystem::remove(folder / "config.json");
  options.model = folder.path();
  expect_part(refused_model(), "holds no config.json");
}

TEST_F(ModelOptions, FlagsChangeSingleFields) {
  options.hidden_size = 256;
  options.num_query_groups = 4;
  options.rotary_base = 5e5;
  options.moe_router_topk = 3;
  options.untie_embeddings_and_output_weights = false;
  const ModelConfig config = load_model_config(options);
  EXPECT_EQ(config.hidden_size, 256);
  EXPECT_EQ(config.num_query_groups, 4);
  EXPECT_EQ(config.rotary_base, 5e5);
  EXPECT_EQ(config.moe_router_topk, 3);
  EXPECT_TRUE(config.tie_embeddings);
  EXPECT_EQ(config.kv_channels, 16) << "not touched";
}

// Each line: flags of a command line, and the fields of the model that they change, all of them.
TEST_F(ModelOptions, FlagsChangeTheirFieldsAndNoOthers) {
  const struct {
    const char* flags;
    const char* changes;
  } lines[] = {
      {"--hidden-size 256", R"({"hidden_size":256})"},
      {"--ffn-hidden-size 80", R"({"ffn_hidden_size":80})"},
      {"--num-attention-heads 4", R"({"num_attention_heads":4})"},
      {"--num-query-groups 4", R"({"num_query_groups":4})"},
      {"--kv-channels 32", R"({"kv_channels":32})"},
      {"--vocab-size 300", R"({"vocab_size":300})"},
      {"--vocab-size 300 --make-vocab-size-divisible-by 128", R"({"vocab_size":384})"},
      {"--max-position-embeddings 99", R"({"max_position_embeddings":99})"},
      {"--rotary-base 123", R"({"rotary_base":123.0})"},
      {"--norm-epsilon 0.25", R"({"norm_epsilon":0.25})"},
      {"--mtp-num-layers 2", R"({"mtp_num_layers":2})"},
      {"--mtp-loss-scaling-factor 0.5", R"({"mtp_loss_scaling_factor":0.5})"},
      {"--mtp-num-layers 2 --mtp-use-repeated-layer",
       R"({"mtp_num_layers":2,"mtp_use_repeated_layer":true})"},
      {"--init-method-std 0.5", R"({"init_method_std":0.5})"},
      {"--embedding-init-method-std 0.5", R"({"embedding_init_method_std":0.5})"},
      {"--init-method-xavier-uniform", R"({"init_method_xavier_uniform":true})"},
      {"--qk-layernorm", R"({"qk_layernorm":true})"},
      {"--qk-l2-norm", R"({"qk_l2_norm":true})"},
      {"--normalization LayerNorm", R"({"normalization":"LayerNorm"})"},
      {"--apply-layernorm-1p", R"({"zero_centered_gamma":true})"},
      {"--add-qkv-bias", R"({"add_qkv_bias":true})"},
      {"--add-bias-linear", R"({"add_bias_linear":true})"},
      {"--activation-func-clamp-value 7", R"({"activation_clamp":7.0})"},
      {"--glu-linear-offset 1", R"({"glu_linear_offset":1.0})"},
      {"--hidden-dropout 0.125", R"({"hidden_dropout":0.125})"},
      {"--attention-dropout 0.125", R"({"attention_dropout":0.125})"},
      {"--moe-ffn-hidden-size 24", R"({"moe_ffn_hidden_size":24})"},
      {"--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
       R"({"moe_shared_expert_intermediate_size":40,"moe_shared_expert_gate":true})"},
      {"--moe-router-topk 3", R"({"moe_router_topk":3})"},
      {"--moe-router-pre-softmax", R"({"moe_router_pre_softmax":true})"},
      {"--moe-router-score-function sigmoid", R"({"moe_router_score_function":"sigmoid"})"},
      {"--moe-router-num-groups 4 --moe-router-group-topk 2",
       R"({"moe_router_num_groups":4,"moe_router_group_topk":2})"},
      {"--moe-router-topk-scaling-factor 2.5", R"({"moe_router_topk_scaling_factor":2.5})"},
      {"--moe-router-dtype fp64", R"({"moe_router_fp64":true})"},
      {"--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
       "--moe-router-bias-update-rate 0.5",
       R"({"moe_router_score_function":"sigmoid","moe_router_enable_expert_bias":true,)"
       R"("moe_router_bias_update_rate":0.5})"},
      {"--moe-input-jitter-eps 0.25", R"({"moe_input_jitter_eps":0.25})"},
      {"--moe-router-force-load-balancing", R"({"moe_router_force_load_balancing":true})"},
      {"--moe-router-force-biased 0.5", R"({"moe_router_force_biased":0.5})"},
      {"--moe-aux-loss-coeff 0.5", R"({"moe_aux_loss_coeff":0.5})"},
      {"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5",
       R"({"moe_aux_loss_coeff":0.0,"moe_seq_aux_loss_coeff":0.5})"},
      {"--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.5",
       R"({"moe_aux_loss_coeff":0.0,"moe_global_aux_loss_coeff":0.5})"},
      {"--moe-z-loss-coeff 0.5", R"({"moe_z_loss_coeff":0.5})"},
      {"--moe-expert-capacity-factor 1.5", R"({"moe_expert_capacity_factor":1.5})"},
      {"--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position "
       "--moe-pad-expert-input-to-capacity",
       R"({"moe_expert_capacity_factor":1.5,"moe_token_drop_policy":"position",)"
       R"("moe_pad_expert_input_to_capacity":true})"},
      {"--moe-router-padding-for-quantization", R"({"moe_expert_row_multiple":16})"},
      {"--moe-expert-row-multiple 4", R"({"moe_expert_row_multiple":4})"},
  };
  using nlohmann::json;
  const auto described = [&](const std::string& flags) {
    json fields = json::parse(write_model_config(load_model_config(parsed_flags(flags))));
    fields.erase("hf_architecture");  // the one that fits the others
    return fields;
  };
  const json before = described("");
  for (const auto& line : lines) {
    SCOPED_TRACE(line.flags);
    json changed = json::object();
    const json after = described(line.flags);
    for (const auto& [name, value] : after.items()) {
      if (value != before.at(name)) changed[name] = value;
    }
    EXPECT_EQ(changed, json::parse(line.changes));
  }
}

TEST_F(ModelOptions, ActivationsAreNamed) {
  const struct {
    const char* name;
    ActivationFunction function;
    bool gated;
  } activations[] = {{"swiglu", ActivationFunction::silu, true},
                     {"geglu", ActivationFunction::gelu, true},
                     {"geglu-tanh", ActivationFunction::gelu_tanh, true},
                     {"quick-geglu", ActivationFunction::quick_gelu, true},
                     {"reglu", ActivationFunction::relu, true},
                     {"gelu", ActivationFunction::gelu, false},
                     {"gelu-tanh", ActivationFunction::gelu_tanh, false},
                     {"silu", ActivationFunction::silu, false},
                     {"relu", ActivationFunction::relu, false},
                     {"squared-relu", ActivationFunction::squared_relu, false}};
  for (const auto& activation : activations) {
    set_option(options, *find_option("activation"), activation.name);
    const ModelConfig config = load_model_config(options);
    EXPECT_EQ(config.activation, activation.function) << activation.name;
    EXPECT_EQ(config.gated_linear_unit, activation.gated) << activation.name;
  }
}

TEST_F(ModelOptions, ChangedShapesAreValidated) {
  options.moe_router_topk = 9;
  expect_part(refused_model(), "--moe-router-topk (9) is larger than --num-experts (8)");
}

// A config.json may say what only flags beside it make possible.
TEST_F(ModelOptions, SinkhornRoutesToOneExpertOfAConfigThatCouldNot) {
  ModelConfig config = mixtral_like_model(2);
  config.moe_z_loss_coeff = 0;
  config.hf_architecture = "MixtralForCausalLM";
  config.moe_router_topk = 1;
  put_file(folder / "config.json", write_hf_config(config));
  expect_part(refused_model(), "needs --moe-router-pre-softmax");
  options.moe_router_load_balancing_type = {LoadBalancing::sinkhorn};
  EXPECT_TRUE(load_model_config(options).moe_router_sinkhorn);
}

TEST_F(ModelOptions, MoreLayersAreOfTheSameKind) {
  options.num_layers = 5;
  const ModelConfig config = load_model_config(options);
  EXPECT_EQ(config.num_layers, 5);
  EXPECT_EQ(config.moe_layer_count(), 5);
}

TEST_F(ModelOptions, MoreLayersOfAMixedModelAreNotGuessed) {
  ModelConfig config = moe_model(3);
  config.qk_layernorm = true;
  config.ffn_hidden_size = 40;
  config.moe_layers = {false, true, true};
  config.hf_architecture = "Qwen3MoeForCausalLM";
  put_file(folder / "config.json", write_hf_config(config));
  options.num_layers = 4;
  expect_part(refused_model(), "has dense and MoE layers, 3 in all");
  options.num_layers = 2;
  EXPECT_EQ(load_model_config(options).moe_layers, (std::vector<bool>{false, true}));
}

TEST_F(ModelOptions, MoreLayersOfAMixtureOfAttentionsAreNotGuessed) {
  const auto use = [&](const char* name) {
    options.model = std::string(TROUPE_FIXTURE_DIR "/hf/") + name;
    options.num_layers.reset();
    return load_model_config(options);
  };
  const ModelConfig windows = use("gpt_oss");
  options.num_layers = windows.num_layers + 1;
  expect_part(refused_model(), "has layers with a window and layers without, 2 in all");
  options.num_layers = 1;
  EXPECT_EQ(load_model_config(options).window_layers, (std::vector<bool>{true}));
  const ModelConfig linear = use("qwen3_next");
  options.num_layers = linear.num_layers + 1;
  expect_part(refused_model(), "--num-layers " + std::to_string(linear.num_layers + 1) +
                                   ": this model has layers with attention and layers with gated "
                                   "delta nets, " +
                                   std::to_string(linear.num_layers) + " in all");
  options.num_layers = linear.num_layers - 1;
  std::vector<bool> fewer = linear.linear_attention_layers;
  fewer.pop_back();
  EXPECT_EQ(load_model_config(options).linear_attention_layers, fewer);
}

TEST_F(ModelOptions, BiasesHaveOneFlag) {
  options.disable_bias_linear = true;
  EXPECT_FALSE(load_model_config(options).add_bias_linear);
  options.disable_bias_linear = false;
  EXPECT_TRUE(load_model_config(options).add_bias_linear);
  options.add_bias_linear = true;
  EXPECT_EQ(refused_model(), "--add-bias-linear and --disable-bias-linear contradict each other.");
}

TEST_F(ModelOptions, SizesOfLatentAttentionNeedLatentAttention) {
  const std::pair<const char*, std::optional<int32_t> Options::*> sizes[] = {
      {"--q-lora-rank", &Options::q_lora_rank},
      {"--kv-lora-rank", &Options::kv_lora_rank},
      {"--qk-head-dim", &Options::qk_head_dim},
      {"--qk-pos-emb-head-dim", &Options::qk_pos_emb_head_dim},
      {"--v-head-dim", &Options::v_head_dim}};
  for (const auto& [flag, size] : sizes) {
    options.*size = 8;
    expect_part(refused_model(), flag);
    expect_part(refused_model(), "--multi-latent-attention");
    (options.*size).reset();
  }
}

TEST_F(ModelOptions, APaddingMaskNeedsRouters) {
  options.moe_router_ignore_padding = true;
  EXPECT_NO_THROW(load_model_config(options));
  options.num_experts = 0;
  options.ffn_hidden_size = 64;
  expect_part(refused_model(), "--moe-router-ignore-padding: this model has no experts");
  options.moe_router_ignore_padding = false;
  options.moe_layer_freq = "1";
  expect_part(refused_model(), "--moe-layer-freq: this model has no experts");
}

// Two levels make no difference where there is one rank.
TEST_F(ModelOptions, AnExchangeInTwoLevelsNeedsRanks) {
  options.cp_comm_type = CpCommType::a2a_p2p;
  EXPECT_EQ(context_exchange_of(options), ContextExchange::p2p);
  options.context_parallel_size = 2;
  expect_part(refusal([&] { context_exchange_of(options); }),
              "--cp-comm-type a2a+p2p: this version has no exchange in two levels.");
}

TEST_F(ModelOptions, ADenseModelAndBack) {
  options.num_experts = 0;
  expect_part(refused_model(), "--ffn-hidden-size");
  options.ffn_hidden_size = 64;
  const ModelConfig dense = load_model_config(options);
  EXPECT_EQ(dense.moe_layer_count(), 0);
  EXPECT_EQ(dense.hf_architecture, "LlamaForCausalLM");

  put_file(folder / "config.json", write_hf_config(dense));
  options.num_experts = 4;
  options.moe_router_topk = 2;
  options.moe_ffn_hidden_size = 32;
  options.qk_layernorm = true;
  const ModelConfig moe = load_model_config(options);
  EXPECT_EQ(moe.moe_layer_count(), 2);
  EXPECT_EQ(moe.hf_architecture, "Qwen3MoeForCausalLM");
}

// What a number of experts makes of the layers: a dense model has none with experts, one that gets
// experts has them in all layers, and any other keeps its own.
TEST_F(ModelOptions, ANumberOfExpertsKeepsTheLayersThatHaveThem) {
  ModelConfig base = load_model_config(options);
  base.num_layers = 3;
  base.ffn_hidden_size = 64;
  base.moe_router_topk = 1;
  base.moe_router_pre_softmax = true;
  base.moe_router_normalize_scores = false;
  base.moe_layers = {true, false, true};
  ModelConfig dense = base;
  dense.num_experts = 0;
  dense.ffn_hidden_size = dense.moe_ffn_hidden_size;
  dense.moe_layers = {};
  Options flags;
  flags.command = Command::train;
  const auto layers = [&](const ModelConfig& from, int32_t experts) {
    flags.num_experts = experts;
    return load_model_config(flags, &from).moe_layers;
  };
  const std::vector<bool> none;
  const std::vector<bool> all(3, true);
  for (const int32_t experts : {0, 1, 2}) {
    EXPECT_EQ(layers(base, experts), experts == 0 ? none : base.moe_layers) << experts;
    EXPECT_EQ(layers(dense, experts), experts == 0 ? none : all) << experts;
  }
}

// Of a base that stretches positions in its own way, each of the flags leaves what Megatron has, in
// all fields.
TEST_F(ModelOptions, AWayToStretchPositionsReplacesAnother) {
  ModelConfig base = load_model_config(options);
  const ModelConfig plain = base;
  base.rope_scaling_type = RopeScalingKind::linear;
  base.rope_scaling_factor = 3;
  base.rope_original_positions = 17;
  base.rope_scaling_fast = 7;
  base.rope_scaling_slow = 5;
  base.rope_round_range = false;
  base.rope_mscale = 0.25;
  base.rope_mscale_all_dim = 0.5;
  base.rope_attention_factor = 1.5;
  const auto made = [&](const std::string& flags) {
    Options said = parsed_flags(flags);
    said.model.clear();
    return load_model_config(said, &base);
  };
  ModelConfig kept = base;
  kept.hf_architecture = made("").hf_architecture;  // none has these fields
  EXPECT_EQ(made(""), kept);

  ModelConfig yarn = plain;
  yarn.rope_scaling_type = RopeScalingKind::yarn;
  yarn.rope_scaling_factor = 2;
  yarn.rope_original_positions = 4096;
  yarn.rope_scaling_fast = 32;
  yarn.rope_scaling_slow = 1;
  yarn.rope_mscale = 1;
  EXPECT_EQ(made("--rope-type yarn --rotary-scaling-factor 2"), yarn);
  EXPECT_EQ(made("--position-embedding-type yarn --rotary-scaling-factor 2"), yarn);

  EXPECT_EQ(made("--rope-type yarn"), plain) << "by a factor of 1";
  EXPECT_EQ(made("--rope-type rope"), plain);
  ModelConfig linear = plain;
  linear.rope_scaling_type = RopeScalingKind::linear;
  linear.rope_scaling_factor = 4;
  EXPECT_EQ(made("--rotary-seq-len-interpolation-factor 4"), linear);

  ModelConfig llama = plain;
  llama.rope_scaling_type = RopeScalingKind::llama3;
  llama.rope_scaling_factor = 8;
  llama.rope_original_positions = 8192;
  llama.rope_scaling_fast = 4;
  llama.rope_scaling_slow = 1;
  EXPECT_EQ(made("--use-rope-scaling"), llama);
}

// Megatron's concentration is a ratio of two lengths, which is kept as a factor where a config.json
// could not say it: where one of the two is 0, except both by default.
TEST_F(ModelOptions, TheConcentrationOfYarnIsKeptWhereAFileCouldNotSayIt) {
  const auto factor = [&](const std::string& flags) {
    return load_model_config(parsed_flags("--rope-type yarn --rotary-scaling-factor 8 " + flags))
        .rope_attention_factor;
  };
  const auto length = [](double mscale) { return 0.1 * mscale * std::log(8.0) + 1; };
  EXPECT_EQ(factor(""), 0);
  EXPECT_EQ(factor("--mscale 1"), 0) << "as by default";
  EXPECT_EQ(factor("--mscale 1 --mscale-all-dim 0"), 0);
  EXPECT_EQ(factor("--mscale 0.5 --mscale-all-dim 0.25"), 0);
  EXPECT_DOUBLE_EQ(factor("--mscale 0.5"), length(0.5));
  EXPECT_DOUBLE_EQ(factor("--mscale 0 --mscale-all-dim 0.5"), 1 / length(0.5));
  EXPECT_EQ(factor("--mscale 0"), 1);
}

TEST_F(ModelOptions, Step) {
  const ModelConfig config = load_model_config(options);
  EXPECT_EQ(training_step_options(options, config).sequence, config.max_position_embeddings);
  EXPECT_EQ(training_step_options(options, config).micro_batches, 1);
  options.micro_batch_size = 4;
  options.global_batch_size = 12;
  options.seq_length = 64;
  options.clip_grad = 0.5;
  const TrainingStepOptions step = training_step_options(options, config);
  EXPECT_EQ(step.micro_batch_size, 4);
  EXPECT_EQ(step.micro_batches, 3);
  EXPECT_EQ(step.sequence, 64);
  EXPECT_EQ(step.clip_grad, 0.5);
}

// Each line: flags, and a fact of the step that they alone bring about.
TEST_F(ModelOptions, FlagsChangeTheStep) {
  using Step = TrainingStepOptions;
  const struct {
    const char* flags;
    bool (*is_fact)(const Step&);
  } lines[] = {
      {"--micro-batch-size 2 --global-batch-size 2",
       [](const Step& step) { return step.micro_batch_size == 2; }},
      {"--global-batch-size 3", [](const Step& step) { return step.micro_batches == 3; }},
      {"--seq-length 12", [](const Step& step) { return step.sequence == 12; }},
      {"--clip-grad 0.5", [](const Step& step) { return step.clip_grad == 0.5; }},
      {"--grad-norm-skip-threshold 3", [](const Step& step) { return step.skip_norm == 3; }},
      {"--decoupled-lr 0.5", [](const Step& step) { return step.decoupled_learning_rate; }},
      {"--apply-wd-to-qk-layernorm", [](const Step& step) { return step.decay_qk_norms; }},
      {"--log-num-zeros-in-grad", [](const Step& step) { return step.count_zero_gradients; }},
      {"--log-params-norm", [](const Step& step) { return step.parameter_norm; }},
      {"--log-fp8-saturation --fp8-format e4m3",
       [](const Step& step) { return step.precision.counts_codes; }},
      {"--seed 77", [](const Step& step) { return step.seed == 77; }},
      {"--moe-token-dispatcher-type flex",
       [](const Step& step) { return step.dispatcher == TokenDispatcher::flex; }},
      {"--moe-token-dispatcher-type hierarchical --moe-dispatch-ranks-per-node 2",
       [](const Step& step) { return step.dispatcher == TokenDispatcher::hierarchical; }},
      {"--cp-comm-type a2a",
       [](const Step& step) { return step.context_exchange == ContextExchange::a2a; }},
      {"--calculate-per-token-loss", [](const Step& step) { return step.per_token_loss; }},
      {"--moe-router-ignore-padding", [](const Step& step) { return step.ignore_padding; }},
      {"--ddp-bucket-size 99 --ranks 2 --global-batch-size 2",
       [](const Step& step) { return step.gradient_bucket_elements == 99; }},
      {"--overlap-grad-reduce", [](const Step& step) { return step.overlap_gradient_sums; }},
      {"--overlap-param-gather --use-distributed-optimizer --overlap-grad-reduce",
       [](const Step& step) { return step.overlap_parameter_gathers; }},
      {"--loss-chunk-tokens 5", [](const Step& step) { return step.loss_chunk_tokens == 5; }},
      {"--fp8-format hybrid --fp8-recipe tensorwise",
       [](const Step& step) {
         return step.precision == PrecisionOptions{.recipe = Fp8Recipe::tensorwise,
                                                   .format = Fp8Format::hybrid,
                                                   .kept = step.precision.kept};
       }},
      {"--fp4-format e2m1 --fp4-recipe nvfp4",
       [](const Step& step) {
         return step.precision ==
                PrecisionOptions{.recipe = Fp8Recipe::nvfp4, .kept = step.precision.kept};
       }},
      {"--fp8-format hybrid --fp8-amax-compute-algo max --fp8-margin 2",
       [](const Step& step) {
         return step.precision == PrecisionOptions{.recipe = Fp8Recipe::delayed,
                                                   .format = Fp8Format::hybrid,
                                                   .kept = step.precision.kept,
                                                   .delayed = {AmaxChoice::max, 2}};
       }},
      {"--fp8-format e4m3 --fp8-recipe mxfp8 --first-last-layers-bf16 "
       "--num-layers-at-start-in-bf16 0",
       [](const Step& step) {
         const auto& kept = step.precision.kept;
         return kept.size() > 1 && !kept.front()[0] && kept.back()[0];
       }},
  };
  const auto step_of = [&](const std::string& flags) {
    const Options parsed = parsed_flags(flags);
    return training_step_options(parsed, load_model_config(parsed));
  };
  const Step before = step_of("");
  for (const auto& line : lines) {
    SCOPED_TRACE(line.flags);
    EXPECT_FALSE(line.is_fact(before));
    EXPECT_TRUE(line.is_fact(step_of(line.flags)));
  }
}

// Rows are counted in 31 bits: of 1024 tokens with two choices each fewer than 2^20 sequences, and
// as many less as there are ranks that share the experts.
TEST_F(ModelOptions, AMicroBatchHasFewerThan2To31Rows) {
  const ModelConfig config = load_model_config(options);
  const auto expect_most = [&](int32_t most) {
    options.micro_batch_size = most;
    EXPECT_EQ(training_step_options(options, config).micro_batch_size, most);
    options.micro_batch_size = most + 1;
    expect_part(refusal([&] { training_step_options(options, config); }),
                fmt::format("--micro-batch-size {} with sequences of 1024 tokens is too much for "
                            "one micro-batch.",
                            most + 1));
  };
  options.seq_length = 1024;
  expect_most((1 << 20) - 1);
  options.ranks = 8;
  options.expert_model_parallel_size = 4;
  expect_most((1 << 18) - 1);
  options.tensor_model_parallel_size = 2;
  expect_most((1 << 17) - 1);
  options.expert_tensor_parallel_size = 1;
  expect_most((1 << 18) - 1);
}

TEST_F(ModelOptions, ImpossibleStepsAreRefused) {
  const ModelConfig config = load_model_config(options);
  const auto refused_step = [&] {
    return refusal([&] { training_step_options(options, config); });
  };
  options.seq_length = 1025;
  expect_part(refused_step(), "--seq-length 1025 is longer than the model's 1024 positions");
  options.seq_length = 1024;
  options.micro_batch_size = 5;
  options.global_batch_size = 12;
  expect_part(refused_step(), "--global-batch-size 12 is not a multiple of --micro-batch-size 5");
}

TEST_F(ModelOptions, Offload) {
  const ModelConfig config = load_model_config(options);
  const auto refused = [&](const auto& set, const std::string& part) {
    Options wrong = options;
    set(wrong);
    expect_part(refusal([&] {
                  training_step_options(wrong, load_model_config(wrong));
                  run_layout_of(wrong, load_model_config(wrong));
                }),
                part);
  };
  refused([](Options& o) { o.offload_modules = {"core_attn"}; },
          "--offload-modules: it belongs to --fine-grained-activation-offloading");
  refused([](Options& o) { o.min_offloaded_tensor_size = 7; },
          "--min-offloaded-tensor-size: it belongs to --fine-grained-activation-offloading");
  refused([](Options& o) { o.activation_offload_fraction = 0.5; },
          "--activation-offload-fraction: it belongs to --fine-grained-activation-offloading");
  refused([](Options& o) { o.optimizer_offload_fraction = 0.5; },
          "--optimizer-offload-fraction: it belongs to --optimizer-cpu-offload");
  EXPECT_FALSE(training_step_options(options, config).offload.any());
  EXPECT_EQ(run_layout_of(options, config).optimizer_offload, 0);

  options.fine_grained_activation_offloading = true;
  refused([](Options&) {}, "say whose inputs go to the host: --offload-modules");
  refused([](Options& o) { o.offload_modules = {"mlp"}; },
          "--offload-modules 'mlp': there is no such module");
  options.offload_modules = {"moe_act"};
  expect_part(refusal([&] { training_step_options(options, dense_model(2)); }),
              "--offload-modules moe_act: it belongs to experts, and the model has none");
  options.offload_modules = {"core_attn", "expert_fc1"};
  options.activation_offload_fraction = 0.5;
  options.optimizer_cpu_offload = true;
  const OffloadOptions offload = training_step_options(options, config).offload;
  EXPECT_EQ(offload.modules, (ModuleSet{&kCoreAttentionModule, &kExpertFc1Module}));
  EXPECT_EQ(offload.least_elements, 1024 * 1024);
  EXPECT_EQ(offload.fraction, 0.5);
  EXPECT_EQ(run_layout_of(options, config).optimizer_offload, 1);
}

TEST_F(ModelOptions, Stash) {
  const auto refused = [](const Options& options, const ModelConfig& config, const char* part) {
    expect_part(refusal([&] { training_step_options(options, config); }), part);
  };
  const ModelConfig config = load_model_config(options);
  EXPECT_FALSE(training_step_options(options, config).stash.any());
  Options without = options;
  without.moe_paged_stash_buffer_size_factor_cuda = 1.5;
  refused(without, config,
          "--moe-paged-stash-buffer-size-factor-cuda: it belongs to --moe-paged-stash");
  without = options;
  without.moe_paged_stash_page_size = 32;
  refused(without, config, "--moe-paged-stash-page-size: it belongs to --moe-paged-stash");

  options.moe_paged_stash = true;
  refused(options, dense_model(2),
          "--moe-paged-stash: it belongs to experts, and the model has none");
  options.compute_dtype = DType::bf16;
  StashOptions stash = training_step_options(options, config).stash;
  EXPECT_EQ(stash.factor, 1.1);
  EXPECT_EQ(stash.page_bytes, 64 * config.hidden_size * 2);
  options.compute_dtype = DType::f64;
  options.moe_paged_stash_buffer_size_factor_cuda = 1.5;
  options.moe_paged_stash_page_size = 3;
  stash = training_step_options(options, config).stash;
  EXPECT_EQ(stash.factor, 1.5);
  EXPECT_EQ(stash.page_bytes, 3 * config.hidden_size * 8);
}

TEST_F(ModelOptions, AdamW) {
  options.adam_beta1 = 0.25;
  options.adam_beta2 = 0.5;
  options.adam_eps = 0.75;
  options.use_precision_aware_optimizer = true;
  options.exp_avg_dtype = DType::bf16;
  const RunLayout run = run_layout_of(options, load_model_config(options));
  const auto* adamw = dynamic_cast<const AdamWOptimizer*>(run.optimizer.get());
  ASSERT_NE(adamw, nullptr);
  EXPECT_EQ(adamw->options().beta1, 0.25);
  EXPECT_EQ(adamw->options().beta2, 0.5);
  EXPECT_EQ(adamw->options().epsilon, 0.75);
  EXPECT_EQ(adamw->options().exp_avg, DType::bf16);
  EXPECT_EQ(adamw->options().exp_avg_sq, DType::f32);
}

TEST_F(ModelOptions, Recompute) {
  const ModelConfig config = load_model_config(options);
  const auto recompute = [&] { return training_step_options(options, config).recompute; };
  EXPECT_FALSE(recompute().any());
  options.recompute_granularity = RecomputeOptions::Granularity::selective;
  EXPECT_EQ(recompute().modules, ModuleSet{&kCoreAttentionModule}) << "Megatron's default";
  options.recompute_modules = {"layernorm", "moe_act"};
  EXPECT_EQ(recompute().modules, (ModuleSet{&kExpertActivationModule, &kNormModule}));
  options.recompute_modules = {"mlp", "moe", "shared_experts"};
  EXPECT_EQ(recompute().modules, (ModuleSet{&kMlpModule, &kMoeModule, &kSharedExpertModule}));
  options.recompute_modules.clear();
  options.recompute_granularity = RecomputeOptions::Granularity::full;
  options.recompute_method = RecomputeOptions::Method::block;
  options.recompute_num_layers = 2;
  EXPECT_EQ(recompute().granularity, RecomputeOptions::Granularity::full);
  EXPECT_EQ(recompute().method, RecomputeOptions::Method::block);
  EXPECT_EQ(recompute().layers, 2);
}

TEST_F(ModelOptions, CopiesOfExpertsAreRefusedWhereTheyHaveNoMeaning) {
  options.ranks = options.expert_model_parallel_size = 2;
  options.moe_expert_clones = 3;
  options.compute_dtype = DType::bf16;
  EXPECT_EQ(run_layout_of(options, load_model_config(options)).expert_clones, 3);
  const auto refused = [&](const auto& change) {
    Options changed = options;
    change(changed);
    return refusal([&] { run_layout_of(changed, load_model_config(changed)); });
  };
  expect_part(refused([](Options& o) {
                o.moe_pad_expert_input_to_capacity = true;
                o.moe_expert_capacity_factor = 1;
              }),
              "--moe-expert-clones 3: with --moe-pad-expert-input-to-capacity every expert");
  expect_part(refused([](Options& o) { o.fp8_format = Fp8Format::e4m3; }),
              "--moe-expert-clones 3: copies of experts whose products are in 8 or 4 bits");
  options.fp8_format = Fp8Format::e4m3;
  options.fp8_modules = {"attention"};
  EXPECT_EQ(run_layout_of(options, load_model_config(options)).expert_clones, 3);
  ModelConfig dense = load_model_config(options);
  dense.num_experts = 0;
  dense.ffn_hidden_size = dense.moe_ffn_hidden_size;
  options.expert_model_parallel_size = 1;
  EXPECT_EQ(run_layout_of(options, dense).expert_clones, 0);
}

TEST_F(ModelOptions, ImpossibleRecomputeIsRefused) {
  const ModelConfig config = load_model_config(options);
  const auto refused = [&] { return refusal([&] { training_step_options(options, config); }); };
  options.recompute_modules = {"moe"};
  expect_part(refused(), "--recompute-modules: it belongs to --recompute-granularity selective");
  options.recompute_granularity = RecomputeOptions::Granularity::selective;
  options.recompute_modules = {"mla_up_proj"};
  expect_part(refused(), "mla_up_proj belongs to multi-latent attention");
  options.recompute_modules = {"moe", "attn"};
  expect_part(refused(),
              "'attn': there is no such module. Choose among mla_up_proj, core_attn, moe_act");
  options.recompute_modules.clear();
  options.recompute_num_layers = 1;
  expect_part(refused(), "--recompute-num-layers: it belongs to --recompute-granularity full");
  options.recompute_granularity = RecomputeOptions::Granularity::full;
  expect_part(refused(), "needs --recompute-method uniform or block");
  options.recompute_method = RecomputeOptions::Method::uniform;
  options.recompute_num_layers = 3;
  expect_part(refused(), "--recompute-num-layers 3: the model has 2 layers");
}

TEST_F(ModelOptions, LayoutFlagsThatContradictEachOtherAreRefused) {
  const ModelConfig config = load_model_config(options);  // two layers
  options.ranks = options.pipeline_model_parallel_size = 2;
  const auto refused = [&](const auto& change, const std::string& part) {
    Options changed = options;
    change(changed);
    expect_part(refusal([&] { run_layout_of(changed, config); }), part);
  };
  EXPECT_NO_THROW(run_layout_of(options, config));
  refused([](Options& o) { o.data_parallel_sharding_strategy = StateSharding::optimizer; },
          "--data-parallel-sharding-strategy optim: it belongs to --use-megatron-fsdp");
  refused([](Options& o) { o.num_distributed_optimizer_instances = 2; },
          "--num-distributed-optimizer-instances 2: it says among how many ranks state is sharded");
  refused([](Options& o) { o.moe_token_dispatcher_type = TokenDispatcher::hierarchical; },
          "say how many ranks a node has, with --moe-dispatch-ranks-per-node N");
  refused(
      [](Options& o) { o.moe_dispatch_ranks_per_node = 8; },
      "--moe-dispatch-ranks-per-node 8: it belongs to --moe-token-dispatcher-type hierarchical");
  refused([](Options& o) { o.num_layers_per_virtual_pipeline_stage = 3; },
          "--num-layers-per-virtual-pipeline-stage 3: 2 layers are not a multiple of 3 x 2 ranks");
  refused(
      [](Options& o) {
        o.num_virtual_stages_per_pipeline_rank = o.num_layers_per_virtual_pipeline_stage = 1;
      },
      "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage say");
  refused(
      [](Options& o) {
        o.decoder_first_pipeline_num_layers = o.num_layers_per_virtual_pipeline_stage = 1;
      },
      "--num-layers-per-virtual-pipeline-stage: ranks of the pipeline have different numbers");
  options.pipeline_model_parallel_layout = "Et|tL";
  EXPECT_NO_THROW(run_layout_of(options, config));
  refused([](Options& o) { o.decoder_first_pipeline_num_layers = 1; },
          "--pipeline-model-parallel-layout says what each stage holds");
  refused([](Options& o) { o.num_virtual_stages_per_pipeline_rank = 1; },
          "leave --num-virtual-stages-per-pipeline-rank out");
  refused([](Options& o) { o.num_layers_per_virtual_pipeline_stage = 1; },
          "leave --num-layers-per-virtual-pipeline-stage out");
}

TEST_F(ModelOptions, Overlap) {
  const ModelConfig config = load_model_config(options);
  EXPECT_FALSE(training_step_options(options, config).overlap.any());
  options.delay_wgrad_compute = options.moe_shared_expert_overlap = true;
  EXPECT_TRUE(training_step_options(options, config).overlap.delay_weight_gradients);
  EXPECT_TRUE(training_step_options(options, config).overlap.shared_expert);

  options.overlap_moe_expert_parallel_comm = true;
  expect_part(refusal([&] { run_layout_of(options, config); }),
              "--overlap-moe-expert-parallel-comm hides exchanges between ranks");
  options.ranks = options.expert_model_parallel_size = 2;
  EXPECT_TRUE(run_layout_of(options, config).schedule.merged);
  options.ranks = 4;
  options.pipeline_model_parallel_size = 2;
  options.pipeline_schedule = PipelineSchedule::zb_h1;
  expect_part(refusal([&] { run_layout_of(options, config); }), "zb-h1 has an order of its own");
}

// What moves the embedding's gradients cannot go with chunks of a head that has the same weights on
// the same rank.
TEST_F(ModelOptions, LossChunks) {
  ModelConfig config = load_model_config(options);
  EXPECT_EQ(training_step_options(options, config).loss_chunk_tokens, 0);
  options.loss_chunk_tokens = 100;
  EXPECT_EQ(training_step_options(options, config).loss_chunk_tokens, 100);
  options.ranks = options.expert_model_parallel_size = 2;
  options.overlap_moe_expert_parallel_comm = true;
  config.tie_embeddings = false;
  EXPECT_TRUE(run_layout_of(options, config).schedule.merged);
  config.tie_embeddings = true;
  expect_part(refusal([&] { run_layout_of(options, config); }),
              "--loss-chunk-tokens: here the rank of the head has the embedding, too");
  options.overlap_moe_expert_parallel_comm = false;
  EXPECT_FALSE(run_layout_of(options, config).schedule.merged);
}

}  // namespace
}  // namespace troupe
