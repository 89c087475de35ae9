// From options to the model's shape and the step: where --model is looked for, what the flags
// change, and what is refused.
#include "train/model_options.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <string>

#include "base/error.h"
#include "io/hf_config.h"
#include "program/test_models.h"
#include "support/errors.h"
#include "support/files.h"
#include "train/layout_options.h"

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
    options.activation = activation.name;
    const ModelConfig config = load_model_config(options);
    EXPECT_EQ(config.activation, activation.function) << activation.name;
    EXPECT_EQ(config.gated_linear_unit, activation.gated) << activation.name;
  }
}

TEST_F(ModelOptions, ChangedShapesAreValidated) {
  options.moe_router_topk = 9;
  expect_part(refused_model(), "moe_router_topk (9) is larger than num_experts (8)");
}

// A config.json may say what only flags beside it make possible.
TEST_F(ModelOptions, SinkhornRoutesToOneExpertOfAConfigThatCouldNot) {
  ModelConfig config = mixtral_like_model(2);
  config.moe_z_loss_coeff = 0;
  config.hf_architecture = "MixtralForCausalLM";
  config.moe_router_topk = 1;
  put_file(folder / "config.json", write_hf_config(config));
  expect_part(refused_model(), "needs --moe-router-pre-softmax");
  options.moe_router_load_balancing_type = {"sinkhorn"};
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

TEST_F(ModelOptions, ADenseModelAndBack) {
  options.num_experts = 0;
  expect_part(refused_model(), "ffn_hidden_size");
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

TEST_F(ModelOptions, ComputeDtypes) {
  options.compute_dtype = "fp32";
  EXPECT_EQ(compute_dtype_of(options), DType::f32);
  options.compute_dtype = "fp64";
  EXPECT_EQ(compute_dtype_of(options), DType::f64);
  options.compute_dtype = "bf16";
  EXPECT_EQ(compute_dtype_of(options), DType::bf16);
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
  options.global_batch_size.reset();
  options.micro_batch_size = 1 << 20;  // times 1024 tokens times top 2: 2^31 rows
  expect_part(refused_step(), "too much for one micro-batch");
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
  EXPECT_TRUE(offload.core_attention && offload.expert_fc1);
  EXPECT_FALSE(offload.attention_norm || offload.qkv || offload.attention_out || offload.mlp_norm ||
               offload.expert_activation);
  EXPECT_EQ(offload.least_elements, 1024 * 1024);
  EXPECT_EQ(offload.fraction, 0.5);
  EXPECT_EQ(run_layout_of(options, config).optimizer_offload, 1);
}

TEST_F(ModelOptions, Recompute) {
  const ModelConfig config = load_model_config(options);
  const auto recompute = [&] { return training_step_options(options, config).recompute; };
  EXPECT_FALSE(recompute().any());
  options.recompute_granularity = "selective";
  EXPECT_TRUE(recompute().core_attention) << "Megatron's default";
  options.recompute_modules = {"layernorm", "moe_act"};
  EXPECT_TRUE(recompute().norms && recompute().expert_activation);
  EXPECT_FALSE(recompute().core_attention || recompute().moe || recompute().mlp ||
               recompute().shared_experts);
  options.recompute_modules = {"mlp", "moe", "shared_experts"};
  EXPECT_TRUE(recompute().mlp && recompute().moe && recompute().shared_experts);
  options.recompute_modules.clear();
  options.recompute_granularity = "full";
  options.recompute_method = "block";
  options.recompute_num_layers = 2;
  EXPECT_EQ(recompute().granularity, RecomputeOptions::Granularity::full);
  EXPECT_EQ(recompute().method, RecomputeOptions::Method::block);
  EXPECT_EQ(recompute().layers, 2);
}

TEST_F(ModelOptions, ImpossibleRecomputeIsRefused) {
  const ModelConfig config = load_model_config(options);
  const auto refused = [&] { return refusal([&] { training_step_options(options, config); }); };
  options.recompute_modules = {"moe"};
  expect_part(refused(), "--recompute-modules: it belongs to --recompute-granularity selective");
  options.recompute_granularity = "selective";
  options.recompute_modules = {"mla_up_proj"};
  expect_part(refused(), "mla_up_proj belongs to multi-latent attention");
  options.recompute_modules = {"moe", "attn"};
  expect_part(refused(), "'attn': there is no such module. Choose among core_attn, moe_act");
  options.recompute_modules.clear();
  options.recompute_num_layers = 1;
  expect_part(refused(), "--recompute-num-layers: it belongs to --recompute-granularity full");
  options.recompute_granularity = "full";
  expect_part(refused(), "needs --recompute-method uniform or block");
  options.recompute_method = "uniform";
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
  refused([](Options& o) { o.data_parallel_sharding_strategy = "optim"; },
          "--data-parallel-sharding-strategy optim: it belongs to --use-megatron-fsdp");
  refused([](Options& o) { o.num_distributed_optimizer_instances = 2; },
          "--num-distributed-optimizer-instances 2: it says among how many ranks state is sharded");
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
  options.pipeline_schedule = "zb-h1";
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
