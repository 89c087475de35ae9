// Command lines that were written for Megatron: what is the same, what is accepted and changes
// nothing, what is refused, and the model that flags alone describe.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <stdlib.h>
#include <string>
#include <utility>
#include <vector>

#include "options/command_line.h"
#include "options/foreign_flags.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "options/schedule_options.h"
#include "support/errors.h"

namespace troupe {
namespace {

using testing::message_of;

using Arguments = std::vector<std::string>;

// Megatron's published example of Mixtral 8x7B, flag by flag.
constexpr const char* kMixtral =
    "--disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 "
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm "
    "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 8 --no-masked-softmax-fusion "
    "--no-position-embedding --num-experts 8 --expert-model-parallel-size 8 "
    "--moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall "
    "--tokenizer-type Llama2Tokenizer --tokenizer-model FILE --data-path PREFIX "
    "--split 99990,8,2 --micro-batch-size 1 --global-batch-size 128 --lr 1e-4 "
    "--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 "
    "--weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 --overlap-grad-reduce "
    "--overlap-param-gather --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
    "--num-layers-per-virtual-pipeline-stage 8 --sequence-parallel --use-distributed-optimizer "
    "--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save DIR "
    "--load DIR --tensorboard-dir DIR --ckpt-format torch_dist --auto-detect-ckpt-format";

Arguments words_of(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

CommandLine parse_text(const std::string& text) {
  CommandLine line = parse_command_line(words_of(text));
  EXPECT_EQ(line.text, "") << "options were expected, not help";
  return line;
}

std::string refusal_of_text(const std::string& text) {
  return message_of(ExitStatus::bad_request, [&] { parse_command_line(words_of(text)); });
}

std::string refused_model(const std::string& text) {
  const Options options = parse_text(text).options;
  return message_of(ExitStatus::bad_request, [&] { load_model_config(options); });
}

ModelConfig model_of(const std::string& text) {
  return load_model_config(parse_text(text).options);
}

size_t notes_with(const CommandLine& line, const std::string& start) {
  return static_cast<size_t>(
      std::count_if(line.notes.begin(), line.notes.end(),
                    [&](const std::string& note) { return note.starts_with(start); }));
}

TEST(MegatronFlags, TheWholeMixtralExampleIsPlanned) {
  const CommandLine line = parse_text("plan --ranks 32 " + std::string(kMixtral));
  for (const char* flag :
       {"--no-position-embedding is accepted", "--no-masked-softmax-fusion is accepted",
        "--moe-grouped-gemm is accepted", "--moe-permute-fusion is accepted",
        "--ckpt-format torch_dist is accepted", "--auto-detect-ckpt-format is accepted",
        "--sequence-parallel changes nothing",
        "--tokenizer-model FILE: its files are not here; taken to be Llama 2's, with 32000",
        "troupe plan does not use --data-path, --split, --save, --load, --save-interval, "
        "--eval-interval, --eval-iters, --log-interval, --tensorboard-dir."}) {
    EXPECT_EQ(notes_with(line, flag), 1U) << flag;
  }
  EXPECT_EQ(line.notes.size(), 9U) << "and no other line";

  const Options& options = line.options;
  EXPECT_EQ(options.seq_length, 4096);
  EXPECT_EQ(options.global_batch_size, 128);
  EXPECT_EQ(options.train_iters, 500000);
  EXPECT_EQ(options.lr_decay_iters, 320000);
  EXPECT_EQ(options.min_lr, 1e-5);
  EXPECT_EQ(options.compute_dtype, DType::bf16);
  EXPECT_EQ(options.moe_token_dispatcher_type, TokenDispatcher::alltoall);
  EXPECT_TRUE(options.use_distributed_optimizer);
  EXPECT_TRUE(options.overlap_grad_reduce);
  EXPECT_TRUE(options.overlap_param_gather);

  const ModelConfig config = load_model_config(options);
  EXPECT_FALSE(config.add_bias_linear);
  EXPECT_FALSE(config.add_qkv_bias);
  EXPECT_EQ(config.normalization, Normalization::rms_norm);
  EXPECT_EQ(config.num_query_groups, 8);
  EXPECT_EQ(config.num_experts, 8);
  EXPECT_EQ(config.moe_router_topk, 2);
  EXPECT_FALSE(config.tie_embeddings);
  EXPECT_EQ(config.vocab_size, 32000);
  // The published model, except what the example says otherwise: 1e4 is Megatron's rotary base.
  EXPECT_EQ(config, model_of("plan --model mixtral-8x7b --init-method-std 0.01 --rotary-base 10000 "
                             "--moe-aux-loss-coeff 1e-2"));

  const RunLayout run = run_layout_of(options, config);
  EXPECT_EQ(run.layout.pp(), 4);
  EXPECT_EQ(run.layout.dp(), 8);
  EXPECT_EQ(run.layout.ep(), 8);
  EXPECT_EQ(run.schedule.micro_batches, 16);
  EXPECT_EQ(run.schedule.chunks, 1) << "8 layers per virtual stage are all layers of a rank";
}

constexpr const char* kLatent =
    "plan --num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 "
    "--vocab-size 100 --disable-bias-linear --qk-layernorm --multi-latent-attention ";

TEST(MegatronFlags, LatentAttentionOfFlags) {
  // Megatron's defaults; those of yarn stretch nothing.
  ModelConfig config = model_of(kLatent);
  EXPECT_TRUE(config.multi_latent_attention);
  EXPECT_EQ(config.q_lora_rank, 0);
  EXPECT_EQ(config.kv_lora_rank, 32);
  EXPECT_EQ(config.qk_head_dim, 128);
  EXPECT_EQ(config.qk_pos_emb_head_dim, 64);
  EXPECT_EQ(config.v_head_dim, 128);
  EXPECT_EQ(config.kv_channels, 192);
  EXPECT_EQ(config.num_query_groups, 4);
  EXPECT_TRUE(config.rotary_interleaved);
  EXPECT_EQ(config.rope_scaling_type, RopeScalingKind::none);
  EXPECT_EQ(config.rope_score_factor(), 1);

  config = model_of(std::string(kLatent) +
                    "--q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
                    "--v-head-dim 6 --kv-channels 128 --rotary-scaling-factor 40 --mscale 1.0 "
                    "--mscale-all-dim 1.0 --position-embedding-type rope");
  EXPECT_EQ(config.q_lora_rank, 24);
  EXPECT_EQ(config.kv_lora_rank, 16);
  EXPECT_EQ(config.qk_head_dim, 8);
  EXPECT_EQ(config.qk_pos_emb_head_dim, 4);
  EXPECT_EQ(config.v_head_dim, 6);
  EXPECT_EQ(config.kv_channels, 12);
  EXPECT_EQ(config.rope_scaling_type, RopeScalingKind::yarn);
  EXPECT_EQ(config.rope_scaling(), (RopeScaling{.kind = RopeScalingKind::yarn,
                                                .original_positions = 4096,
                                                .factor = 40,
                                                .fast = 32,
                                                .slow = 1}));
  // (0.1 ln 40 + 1)^2
  EXPECT_NEAR(config.rope_score_factor(), 1.8738542, 1e-6);
  EXPECT_EQ(refused_model(std::string(kLatent) + "--num-query-groups 2")
                .find("Model configuration: --multi-latent-attention has no groups"),
            0U);
  EXPECT_EQ(refused_model("plan --model mixtral-8x7b --q-lora-rank 24"),
            "--q-lora-rank: it belongs to --multi-latent-attention. Add that, or leave the flag "
            "out.");
}

TEST(MegatronFlags, SparseAttentionOfFlags) {
  const std::string latent = std::string(kLatent) + "--q-lora-rank 24 --attention-dropout 0 ";
  const std::string variant = latent + "--experimental-attention-variant dsa ";
  ModelConfig config =
      model_of(variant + "--dsa-indexer-topk 32 --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 80");
  EXPECT_EQ(config.dsa_indexer_topk, 32);
  EXPECT_EQ(config.dsa_indexer_n_heads, 2);
  EXPECT_EQ(config.dsa_indexer_head_dim, 80);
  const std::vector<std::string> least = {"plan", "--dsa-indexer-head-dim", "2"};
  EXPECT_EQ(parse_command_line(least).options.dsa_indexer_head_dim, 2);
  EXPECT_EQ(config.dsa_indexer_k_norm_epsilon, 0);
  EXPECT_EQ(config.dsa_indexer_loss_coeff, 0);
  EXPECT_FALSE(config.dsa_indexer_use_sparse_loss);

  // Fields of a model that has them; flags of Megatron that change nothing.
  config = model_of(
      "plan --model deepseek-v3.2 --dsa-indexer-topk 64 --dsa-indexer-loss-coeff 0.01 "
      "--dsa-indexer-use-sparse-loss --dsa-indexer-k-norm-epsilon 1e-5 --dsa-indexer-topk-freq 1 "
      "--no-dsa-indexer-rotate-activation --dsa-kernel-backend tilelang");
  EXPECT_EQ(config.dsa_indexer_topk, 64);
  EXPECT_EQ(config.dsa_indexer_n_heads, 64);
  EXPECT_EQ(config.dsa_indexer_loss_coeff, 0.01);
  EXPECT_TRUE(config.dsa_indexer_use_sparse_loss);
  EXPECT_EQ(config.dsa_indexer_k_norm_epsilon, 1e-5);

  EXPECT_EQ(refused_model(variant + "--dsa-indexer-topk 32 --dsa-indexer-n-heads 2"),
            "--experimental-attention-variant: it belongs to --dsa-indexer-head-dim. Add that, or "
            "leave the flag out.");
  for (const std::string flag : {"dsa-indexer-topk", "dsa-indexer-n-heads", "dsa-indexer-head-dim",
                                 "dsa-indexer-loss-coeff", "dsa-indexer-k-norm-epsilon"}) {
    EXPECT_EQ(refused_model(latent + "--" + flag + " 4"),
              "--" + flag +
                  ": it belongs to --experimental-attention-variant dsa. Add that, or leave the "
                  "flag out.");
  }
  EXPECT_NE(refused_model("plan --model mixtral-8x7b --experimental-attention-variant dsa "
                          "--dsa-indexer-topk 32 --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 80")
                .find("needs --multi-latent-attention"),
            std::string::npos);
}

constexpr const char* kHybrid =
    "plan --num-layers 8 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 "
    "--vocab-size 100 --disable-bias-linear ";

TEST(MegatronFlags, GatedDeltaNetsOfFlags) {
  // Megatron's defaults of the sizes.
  ModelConfig config = model_of(std::string(kHybrid) +
                                "--experimental-attention-variant gated_delta_net "
                                "--linear-attention-freq 4 --attention-output-gate");
  const std::vector<bool> three_of_four = {true, true, true, false, true, true, true, false};
  EXPECT_EQ(config.linear_attention_layers, three_of_four);
  EXPECT_TRUE(config.attention_output_gate);
  EXPECT_EQ(config.linear_conv_kernel_dim, 4);
  EXPECT_EQ(config.linear_key_head_dim, 128);
  EXPECT_EQ(config.linear_value_head_dim, 128);
  EXPECT_EQ(config.linear_num_key_heads, 16);
  EXPECT_EQ(config.linear_num_value_heads, 32);

  config = model_of(std::string(kHybrid) +
                    "--linear-attention-type gdn --linear-attention-freq ([1]+[0])*4 "
                    "--linear-conv-kernel-dim 3 --linear-key-head-dim 8 --linear-value-head-dim 12 "
                    "--linear-num-key-heads 2 --linear-num-value-heads 6");
  EXPECT_EQ(config.linear_attention_layers,
            (std::vector<bool>{true, false, true, false, true, false, true, false}));
  EXPECT_FALSE(config.attention_output_gate);
  EXPECT_EQ(config.linear_conv_kernel_dim, 3);
  EXPECT_EQ(config.linear_key_head_dim, 8);
  EXPECT_EQ(config.linear_value_head_dim, 12);
  EXPECT_EQ(config.linear_num_key_heads, 2);
  EXPECT_EQ(config.linear_num_value_heads, 6);

  // Fields of a model that has them; a pattern without any is a model without them.
  config = model_of("plan --model qwen3-next-80b-a3b --linear-num-value-heads 48");
  EXPECT_EQ(config.linear_num_value_heads, 48);
  EXPECT_EQ(config.linear_num_key_heads, 16);
  EXPECT_FALSE(config.has_linear_attention(3));
  config = model_of("plan --model qwen3-next-80b-a3b --linear-attention-freq 1");
  EXPECT_TRUE(config.linear_attention_layers.empty());
  EXPECT_EQ(config.linear_key_head_dim, 0);

  EXPECT_EQ(refused_model(std::string(kHybrid) + "--experimental-attention-variant gdn"),
            "--experimental-attention-variant: it belongs to --linear-attention-freq. Add that, or "
            "leave the flag out.");
  for (const std::string flag :
       {"linear-attention-freq", "linear-conv-kernel-dim", "linear-key-head-dim",
        "linear-value-head-dim", "linear-num-key-heads", "linear-num-value-heads"}) {
    EXPECT_EQ(refused_model(std::string(kHybrid) + "--" + flag + " 4"),
              "--" + flag +
                  ": it belongs to --experimental-attention-variant gated_delta_net. Add that, or "
                  "leave the flag out.");
  }
}

// The flags that say nothing without another one, each alone.
TEST(MegatronFlags, FlagsThatBelongToAnotherNeedIt) {
  struct Group {
    std::string needed;
    std::vector<std::string> flags;
  };
  const Group groups[] = {
      {"rope-type yarn",
       {"rotary-scaling-factor 2", "yarn-original-max-position-embeddings 64", "yarn-beta-fast 8",
        "yarn-beta-slow 2", "yarn-correction-range-round-to-int",
        "no-yarn-correction-range-round-to-int", "mscale 1", "mscale-all-dim 1"}},
      {"use-rope-scaling", {"rope-scaling-factor 2"}},
      {"multi-latent-attention",
       {"q-lora-rank 8", "kv-lora-rank 8", "qk-head-dim 8", "qk-pos-emb-head-dim 8",
        "v-head-dim 8"}},
      {"experimental-attention-variant dsa",
       {"dsa-indexer-topk 8", "dsa-indexer-n-heads 2", "dsa-indexer-head-dim 8",
        "dsa-indexer-k-norm-epsilon 1e-6", "dsa-indexer-loss-coeff 0.1",
        "dsa-indexer-use-sparse-loss"}},
      {"mtp-num-layers", {"mtp-use-repeated-layer"}},
      {"window-size", {"window-attn-skip-freq 2"}},
      {"fp8-format",
       {"fp8-recipe delayed", "fp8-param-gather", "log-fp8-saturation", "fp8-modules all",
        "no-fp8-wgrad", "first-last-layers-bf16"}},
      {"fp4-format", {"fp4-recipe nvfp4"}},
      {"first-last-layers-bf16", {"num-layers-at-start-in-bf16 1", "num-layers-at-end-in-bf16 1"}},
      {"fp8-recipe delayed",
       {"fp8-amax-history-len 4", "fp8-amax-compute-algo max", "fp8-margin 1"}},
      {"fine-grained-activation-offloading",
       {"offload-modules moe_act", "min-offloaded-tensor-size 8",
        "activation-offload-fraction 0.5"}},
      {"optimizer-cpu-offload", {"optimizer-offload-fraction 0.5"}},
      {"gpus", {"expert-load dirichlet:1", "train-tokens 1e9"}}};
  for (const Group& group : groups) {
    for (const std::string& flag : group.flags) {
      const std::string name = flag.substr(0, flag.find(' '));
      EXPECT_EQ(
          message_of(ExitStatus::bad_request,
                     [&] {
                       const Options options =
                           parse_text("plan --model mixtral-tiny --" + flag).options;
                       const ModelConfig config = load_model_config(options);
                       training_step_options(options, config);
                       run_layout_of(options, config, nullptr);
                     }),
          "--" + name + ": it belongs to --" + group.needed + ". Add that, or leave the flag out.")
          << flag;
    }
  }
}

TEST(MegatronFlags, WaysToStretchPositions) {
  const auto scaling = [](const std::string& flags) {
    return model_of("plan --model mixtral-8x7b " + flags).rope_scaling();
  };
  EXPECT_EQ(scaling(""), RopeScaling{});
  EXPECT_EQ(scaling("--rotary-seq-len-interpolation-factor 4"),
            (RopeScaling{.kind = RopeScalingKind::linear, .factor = 4}));
  EXPECT_EQ(scaling("--rotary-seq-len-interpolation-factor 1"), RopeScaling{});
  EXPECT_EQ(scaling("--use-rope-scaling"), (RopeScaling{.kind = RopeScalingKind::llama3,
                                                        .original_positions = 8192,
                                                        .factor = 8,
                                                        .fast = 4,
                                                        .slow = 1}));
  EXPECT_EQ(scaling("--use-rope-scaling --rope-scaling-factor 32").factor, 32);
  // Nothing is left of a model's own yarn.
  EXPECT_EQ(model_of("plan --model gpt-oss-20b --use-rope-scaling").rope_scaling(),
            scaling("--use-rope-scaling"));
  for (const char* model : {"gpt-oss-20b", "deepseek-v3"}) {
    const std::string command = std::string("plan --model ") + model;
    EXPECT_EQ(model_of(command + " --rope-type rope").rope_scaling(), RopeScaling{}) << model;
    EXPECT_EQ(model_of(command + " --rope-type rope").rope_score_factor(), 1) << model;
  }
  const RopeScaling yarn = scaling(
      "--position-embedding-type yarn --rotary-scaling-factor 8 --yarn-beta-fast 16 "
      "--yarn-beta-slow 2 --yarn-original-max-position-embeddings 2048 "
      "--no-yarn-correction-range-round-to-int");
  EXPECT_NEAR(yarn.concentration, 1.2079442, 1e-6);  // 0.1 ln 8 + 1
  EXPECT_EQ(yarn, (RopeScaling{.kind = RopeScalingKind::yarn,
                               .round_range = false,
                               .original_positions = 2048,
                               .factor = 8,
                               .fast = 16,
                               .slow = 2,
                               .concentration = yarn.concentration}));
  // Megatron's ratio where one of the two is 0: (0.05 ln 8 + 1) / 1.
  EXPECT_NEAR(scaling("--rope-type yarn --rotary-scaling-factor 8 --mscale 0.5").concentration,
              1.1039721, 1e-6);
  // A factor of its own only where a config.json could not say it by the two numbers.
  for (const char* numbers : {"--mscale 1 --mscale-all-dim 0", "--mscale 0.5 --mscale-all-dim 2"}) {
    EXPECT_EQ(model_of("plan --model mixtral-8x7b --rope-type yarn --rotary-scaling-factor 8 " +
                       std::string(numbers))
                  .rope_attention_factor,
              0)
        << numbers;
  }
  EXPECT_EQ(scaling("--rope-type yarn"), RopeScaling{}) << "by a factor of 1";

  const auto refused = [](const std::string& flags) {
    return refused_model("plan --model mixtral-8x7b " + flags);
  };
  EXPECT_EQ(refused("--mscale 1"),
            "--mscale: it belongs to --rope-type yarn. Add that, or leave the flag out.");
  EXPECT_EQ(refused("--rope-scaling-factor 8"),
            "--rope-scaling-factor: it belongs to --use-rope-scaling. Add that, or leave the flag "
            "out.");
  EXPECT_EQ(refused("--rope-type rope --position-embedding-type yarn"),
            "--position-embedding-type yarn and --rope-type rope contradict each other.");
  EXPECT_EQ(refused("--use-rope-scaling --rope-type yarn --rotary-scaling-factor 2"),
            "--rope-type yarn, --use-rope-scaling and --rotary-seq-len-interpolation-factor are "
            "three ways to stretch positions: choose one.");
  EXPECT_EQ(refused("--rotary-percent 1.5"),
            "Model configuration: --rotary-percent must be above 0 and at most 1, it is 1.5.");
  EXPECT_EQ(refused("--rotary-percent 0.01"),
            "Model configuration: what turns of a head (RoPE) must be even and at least 2: it is 1 "
            "of the head size 128.");
}

TEST(MegatronFlags, WindowsAndSinks) {
  const std::string base = "plan --model mixtral-tiny --num-layers 4 ";
  ModelConfig config = model_of(base + "--window-size 127,0");
  EXPECT_EQ(config.sliding_window, 128);
  EXPECT_TRUE(config.window_layers.empty());
  EXPECT_FALSE(config.attention_sinks);
  config =
      model_of(base + "--window-size (7,0) --window-attn-skip-freq 2 --softmax-type learnable");
  EXPECT_EQ(config.sliding_window, 8);
  EXPECT_EQ(config.window_layers, (std::vector<bool>{true, false, true, false}));
  EXPECT_TRUE(config.attention_sinks);
  config = model_of(base + "--softmax-type off-by-one");
  EXPECT_FALSE(config.attention_sinks);
  EXPECT_TRUE(config.zero_attention_sinks);
  config = model_of(base + "--window-size 7,0 --window-attn-skip-freq [0]+[1]*3");
  EXPECT_EQ(config.window_layers, (std::vector<bool>{false, true, true, true}));
  EXPECT_TRUE(
      model_of(base + "--window-size 7,0 --window-attn-skip-freq [1]*4").window_layers.empty());
  EXPECT_EQ(model_of(base + "--window-size 7,0 --window-attn-skip-freq 1").sliding_window, 0);
  for (const char* size : {"7", "7,1", "(7,0", "-1,0", "x,0", "2147483647,0"}) {
    EXPECT_EQ(refused_model(base + "--window-size=" + size),
              std::string("--window-size \"") + size +
                  "\": write L,0, for the L keys before a query, such as 127,0.");
  }
  EXPECT_EQ(refused_model(base + "--window-attn-skip-freq 2"),
            "--window-attn-skip-freq: it belongs to --window-size. Add that, or leave the flag "
            "out.");
  EXPECT_EQ(refused_model(base + "--window-size 7,0 --window-attn-skip-freq [1]*3"),
            "--window-attn-skip-freq \"[1]*3\": it describes 3 layers, the model has 4. Write a "
            "number, or lists of 0 and 1 such as ([0]*3+[1]*58).");
}

TEST(MegatronFlags, InspectAndBenchTakeTheExampleInOneRank) {
  std::string text = kMixtral;
  for (const char* flag : {"--expert-model-parallel-size 8 ", "--pipeline-model-parallel-size 4 ",
                           "--num-layers-per-virtual-pipeline-stage 8 "}) {
    text.erase(text.find(flag), std::string(flag).size());
  }
  for (const char* command : {"inspect ", "bench "}) {
    const CommandLine line = parse_text(command + text);
    EXPECT_EQ(line.notes.size(), 9U) << command;
    EXPECT_EQ(load_model_config(line.options).num_layers, 32) << command;
  }
  EXPECT_EQ(parse_text("train " + text).notes.size(), 7U)
      << "train uses its flags, and needs the files";
  EXPECT_EQ(parse_text("bench --ranks 32 " + std::string(kMixtral)).options.ranks, 32);
  // Looking needs no run, nor does a group that is not there.
  EXPECT_EQ(parse_text("inspect --ranks 32 --rank 31 " + std::string(kMixtral)).options.rank, 31);
  const Options fake =
      parse_text("train --ranks 32 --fake-process-group " + std::string(kMixtral)).options;
  EXPECT_TRUE(fake.fake_process_group);
  EXPECT_EQ(load_model_config(fake).vocab_size, 32000) << "without the tokenizer's file";
}

TEST(MegatronFlags, EachIsAnOptionOrInTheTableOnce) {
  std::set<std::string_view> names;
  for (const ForeignFlag& flag : foreign_flags()) {
    EXPECT_EQ(find_option(flag.name), nullptr) << flag.name << " is an option";
    EXPECT_TRUE(names.insert(flag.name).second) << flag.name << " stands there twice";
    EXPECT_TRUE(flag.reason.ends_with(".")) << flag.name;
  }
}

TEST(MegatronFlags, EachIsAcceptedOrRefusedWithItsReason) {
  const std::string train = "train --data-path x --train-iters 1 --lr 1 ";
  for (const ForeignFlag& flag : foreign_flags()) {
    const std::string given = "--" + std::string(flag.name);
    const std::string reason(flag.reason);
    if (!flag.accepted) {
      EXPECT_EQ(refusal_of_text(train + given), given + ": " + reason);
      EXPECT_EQ(refusal_of_text(train + given + " 7"), given + ": " + reason);
      continue;
    }
    std::string value = flag.values == ForeignValues::none ? "" : " 7";
    if (flag.values == ForeignValues::many) value += " 8";
    if (!flag.choices.empty()) {
      const std::string choices =
          std::regex_replace(std::string(flag.choices), std::regex(" "), ", ");
      EXPECT_EQ(refusal_of_text(train + given + " 7"),
                given + " 7: Megatron's values are " + choices + ".");
      value = " " + std::string(flag.choices.substr(0, flag.choices.find(' ')));
    }
    if (!flag.only.empty()) {
      EXPECT_EQ(refusal_of_text(train + given + " 7"),
                given + " 7: only " + std::string(flag.only) + " is available: " + reason);
      value = " " + std::string(flag.only);
    }
    EXPECT_EQ(parse_text(train + given + value + " --bf16").notes,
              Arguments{given + value + " is accepted and changes nothing: " + reason});
  }
}

// They were once accepted and ignored.
TEST(MegatronFlags, OlderNamesOfRecomputationRecompute) {
  const auto recompute = [](const std::string& flags) {
    const Options options = parse_text("plan --model qwen3-30b-a3b " + flags).options;
    return training_step_options(options, load_model_config(options)).recompute;
  };
  const std::string selective = "--recompute-granularity selective --recompute-modules ";
  EXPECT_EQ(recompute("--moe-layer-recompute"), recompute(selective + "moe"));
  EXPECT_EQ(recompute("--moe-layer-recompute --recompute-activations"),
            recompute(selective + "core_attn moe"));
  EXPECT_EQ(recompute("--moe-layer-recompute " + selective + "layernorm"),
            recompute(selective + "layernorm moe"));
  EXPECT_EQ(recompute("--checkpoint-activations"),
            recompute("--recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1"));
  for (const char* both : {"--checkpoint-activations --moe-layer-recompute",
                           "--checkpoint-activations --recompute-activations",
                           "--moe-layer-recompute --recompute-granularity full"}) {
    const Options options = parse_text("plan --model qwen3-30b-a3b " + std::string(both)).options;
    const ModelConfig config = load_model_config(options);
    EXPECT_NE(message_of(ExitStatus::bad_request, [&] { training_step_options(options, config); }),
              "")
        << both;
  }
}

RunLayout layout_of(const std::string& flags) {
  const Options options = parse_text("plan --model qwen3-30b-a3b " + flags).options;
  return run_layout_of(options, load_model_config(options));
}

// What Megatron's TransformerBlock gives its stages for the same flags.
TEST(MegatronFlags, UnevenPipelinesAreCutAsInMegatron) {
  const auto text = [](const std::string& flags) { return to_text(layout_of(flags).partition); };
  const std::string pp4 = "--ranks 4 --pipeline-model-parallel-size 4 --num-layers ";
  EXPECT_EQ(text(pp4 + "14 --decoder-first-pipeline-num-layers 2 "
                       "--decoder-last-pipeline-num-layers 2"),
            "Et*2|t*5|t*5|t*2L");
  EXPECT_EQ(text(pp4 + "13 --decoder-first-pipeline-num-layers 4"), "Et*4|t*3|t*3|t*3L");
  EXPECT_EQ(text(pp4 + "10 --decoder-last-pipeline-num-layers 1"), "Et*3|t*3|t*3|tL");
  EXPECT_EQ(text(pp4 + "14 --account-for-embedding-in-pipeline-split "
                       "--account-for-loss-in-pipeline-split"),
            "Et*3|t*4|t*4|t*3L");
  EXPECT_EQ(text(pp4 + "15 --account-for-loss-in-pipeline-split"), "Et*4|t*4|t*4|t*3L");
  EXPECT_EQ(text("--ranks 2 --pipeline-model-parallel-size 2 --num-layers 10 "
                 "--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 4 "
                 "--global-batch-size 2"),
            "Et*2|t*3|t*2|t*3L");
  EXPECT_EQ(text("--ranks 2 --pipeline-model-parallel-size 2 --num-layers 14 "
                 "--num-layers-per-virtual-pipeline-stage 4 --global-batch-size 2 "
                 "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"),
            "Et*3|t*4|t*4|t*3L");
}

TEST(MegatronFlags, PipelinesThatCannotBeCutSoAreRefused) {
  const auto refused = [](const std::string& flags) {
    return message_of(ExitStatus::bad_request, [&] { layout_of(flags); });
  };
  const std::string pp4 = "--ranks 4 --pipeline-model-parallel-size 4 --num-layers ";
  EXPECT_EQ(refused(pp4 + "14 --decoder-first-pipeline-num-layers 3")
                .find("--decoder-first-pipeline-num-layers 3: of 14 layers 11 are left for the 3 "),
            0U);
  EXPECT_EQ(refused(pp4 + "14 --account-for-loss-in-pipeline-split")
                .find("--account-for-loss-in-pipeline-split: 14 layers and 1 that counts"),
            0U);
  EXPECT_NE(refused(pp4 + "14 --account-for-loss-in-pipeline-split "
                          "--decoder-last-pipeline-num-layers 2")
                .find("exclude"),
            std::string::npos);
  EXPECT_EQ(refused(pp4 + "16 --decoder-first-pipeline-num-layers 4 "
                          "--pipeline-model-parallel-layout Ett|tt|tt|ttL")
                .find("--pipeline-model-parallel-layout says what"),
            0U);
  EXPECT_EQ(refused("--ranks 2 --pipeline-model-parallel-size 2 --num-layers 7 "
                    "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2 "
                    "--decoder-last-pipeline-num-layers 1"),
            "--decoder-last-pipeline-num-layers 1: rank 1 of the pipeline then has 1 layer, which "
            "its 2 stages cannot share equally.");
  EXPECT_EQ(refused("--num-layers 4 --decoder-first-pipeline-num-layers 1 "
                    "--decoder-last-pipeline-num-layers 3")
                .find("--decoder-first-pipeline-num-layers 1: the pipeline has one rank"),
            0U);
}

TEST(MegatronFlags, ABatchIsMadeSmallerWhereItsOwnerSaysSo) {
  const std::string flags =
      "plan --model qwen3-30b-a3b --ranks 4 --micro-batch-size 3 --global-batch-size 100 "
      "--train-iters 10 --lr 1 ";
  EXPECT_EQ(refusal_of_text(flags).find("--global-batch-size 100: it must be a multiple of"), 0U);
  const CommandLine line = parse_text(flags + "--decrease-batch-size-if-needed");
  EXPECT_EQ(make_batch_sizes(line.options, 8).largest(), 96);
  EXPECT_EQ(notes_with(line, "--global-batch-size 100 is 96 here"), 1U);
  EXPECT_EQ(make_schedules(line.options).learning_rate.decay_samples, 1000)
      << "the schedules do not depend on the ranks";
  EXPECT_EQ(refusal_of_text("plan --ranks 4 --global-batch-size 3 --decrease-batch-size-if-needed")
                .find("--global-batch-size 3: it must be a multiple"),
            0U)
      << "nothing would be left";
}

TEST(MegatronFlags, MistakesInAcceptedFlagsAreFound) {
  EXPECT_EQ(refusal_of_text("plan --moe_grouped_gemm"),
            "Unknown flag --moe_grouped_gemm. Did you mean --moe-grouped-gemm?");
  EXPECT_EQ(refusal_of_text("plan --moe-groupd-gemm"),
            "Unknown flag --moe-groupd-gemm. Did you mean --moe-grouped-gemm?");
  EXPECT_EQ(refusal_of_text("plan --save-intervall 3"),
            "Unknown flag --save-intervall. Did you mean --save-interval?");
  EXPECT_EQ(refusal_of_text("plan --save-interval x"),
            "--save-interval takes a whole number, at least 1, not 'x'.");
  EXPECT_EQ(refusal_of_text("plan --moe-grouped-gemm=3"), "--moe-grouped-gemm takes no value.");
  EXPECT_EQ(refusal_of_text("plan --moe-grouped-gemm=false"), "--moe-grouped-gemm takes no value.");
  EXPECT_EQ(refusal_of_text("plan --ckpt-format"), "--ckpt-format needs a value.");
  EXPECT_EQ(refusal_of_text("plan --ckpt-format --bf16"),
            "--ckpt-format needs a value, but --bf16 follows (to mean that text: "
            "--ckpt-format=--bf16).");
  EXPECT_EQ(notes_with(parse_text("plan --vocab-extra-ids 0"), "--vocab-extra-ids 0 is accepted"),
            1U);
  EXPECT_EQ(refusal_of_text("plan --vocab-extra-ids 5").find("--vocab-extra-ids 5: only 0 is"), 0U);
  EXPECT_EQ(refusal_of_text("generate --load x --moe-grouped-gemm").find("--moe-grouped-gemm: it "),
            0U);
  EXPECT_EQ(refusal_of_text("plan --cp-comm-type ring"),
            "--cp-comm-type takes p2p, a2a, allgather or a2a+p2p, not 'ring'.");
  EXPECT_EQ(parse_text("plan").options.moe_token_dispatcher_type, TokenDispatcher::allgather);
}

constexpr const char* kSmall =
    "plan --num-layers 2 --hidden-size 48 --num-attention-heads 4 --max-position-embeddings 64 ";

TEST(MegatronFlags, WhatNoFlagSaysIsMegatronsDefault) {
  const ModelConfig dense = model_of(kSmall);
  EXPECT_EQ(dense.normalization, Normalization::layer_norm);
  EXPECT_EQ(dense.activation, ActivationFunction::gelu);
  EXPECT_FALSE(dense.gated_linear_unit);
  EXPECT_TRUE(dense.add_bias_linear);
  EXPECT_TRUE(dense.add_qkv_bias);
  EXPECT_TRUE(dense.tie_embeddings);
  EXPECT_EQ(dense.hidden_dropout, 0.1);
  EXPECT_EQ(dense.attention_dropout, 0.1);
  EXPECT_EQ(dense.ffn_hidden_size, 192);
  EXPECT_EQ(dense.num_query_groups, 4);
  EXPECT_EQ(dense.kv_channels, 12);
  EXPECT_EQ(dense.rotary_base, 10000);
  EXPECT_EQ(dense.init_method_std, 0.02);
  EXPECT_EQ(dense.num_experts, 0);

  const ModelConfig moe = model_of(std::string(kSmall) + "--num-experts 4 --swiglu");
  EXPECT_EQ(moe.moe_layers, (std::vector<bool>{true, true}));
  EXPECT_EQ(moe.moe_ffn_hidden_size, 128) << "8/3 x 48, in whole 64s";
  EXPECT_EQ(moe.moe_router_topk, 2);
  EXPECT_EQ(moe.moe_aux_loss_coeff, 0);
  const ModelConfig mixed = model_of(std::string(kSmall) +
                                     "--num-experts 4 --moe-layer-freq ([0]+[1]) "
                                     "--ffn-hidden-size 96 --moe-ffn-hidden-size 24");
  EXPECT_EQ(mixed.ffn_hidden_size, 96);
  EXPECT_EQ(mixed.moe_ffn_hidden_size, 24);
  EXPECT_FALSE(model_of(std::string(kSmall) + "--disable-bias-linear").add_qkv_bias);
  EXPECT_TRUE(model_of(std::string(kSmall) + "--disable-bias-linear --add-qkv-bias").add_qkv_bias);
}

// Megatron's fused kernel is the tanh form.
TEST(MegatronFlags, TheFormOfGeluIsSaidWhereMegatronsDiffers) {
  const auto says = [](const std::string& flags) {
    return notes_with(parse_text(kSmall + flags), "The activation is gelu in its exact form") == 1;
  };
  EXPECT_TRUE(says(""));
  for (const char* flag : {"--no-bias-gelu-fusion", "--disable-bias-linear", "--swiglu",
                           "--openai-gelu", "--activation gelu"}) {
    EXPECT_FALSE(says(flag)) << flag;
  }
}

TEST(MegatronFlags, VocabulariesOfTokenizersThatAreNotThere) {
  const auto vocabulary = [](const std::string& flags) {
    return model_of(kSmall + flags + " --make-vocab-size-divisible-by 1").vocab_size;
  };
  const std::string hub = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model ";
  const std::vector<std::pair<std::string, int32_t>> known = {
      {"mistralai/Mixtral-8x22B-Instruct-v0.3", 32768},
      {"mistralai/Mixtral-8x7B-v0.1", 32000},
      {"mistralai/Mistral-7B-v0.1", 32000},
      {"Qwen/Qwen3-30B-A3B", 151669},
      {"Qwen/Qwen2.5-7B", 151665},
      {"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 151665},
      {"Qwen/Qwen2-57B-A14B", 151646},
      {"deepseek-ai/DeepSeek-V2-Lite", 100002},
      {"unsloth/DeepSeek-V3", 128815},
      {"deepseek-ai/DeepSeek-R1", 128815},
      {"moonshotai/Kimi-K2-Base", 163840},
      {"meta-llama/Llama-2-7b-hf", 32000},
      {"meta-llama/Llama-3.1-8B", 128256},
      {"nvidia/Llama3-ChatQA-1.5-8B", 128256},
      {"openai/gpt-oss-20b", 200019},
      {"allenai/OLMoE-1B-7B-0924", 50280},
      {"nvidia/nemotron_2_256k", 256000},
  };
  for (const auto& [name, size] : known) EXPECT_EQ(vocabulary(hub + name), size) << name;
  EXPECT_EQ(vocabulary("--tokenizer-type Llama2Tokenizer --tokenizer-model FILE"), 32000);
  EXPECT_EQ(vocabulary("--tokenizer-type GPT2BPETokenizer --vocab-file V --merge-file M"), 50257);
  EXPECT_EQ(vocabulary("--tokenizer-type TikTokenizer --tokenizer-model F"), 131072);
  EXPECT_EQ(vocabulary("--tokenizer-type NullTokenizer --vocab-size 1000"), 1000);
  EXPECT_EQ(
      model_of(kSmall + std::string("--tokenizer-type NullTokenizer --vocab-size 1000")).vocab_size,
      1024)
      << "filled up as Megatron does";
  EXPECT_EQ(notes_with(parse_text(kSmall + hub + "Qwen/Qwen3-30B-A3B"),
                       "--tokenizer-model Qwen/Qwen3-30B-A3B: its files are not here; taken to be "
                       "Qwen3's, with 151669 tokens."),
            1U);
  EXPECT_NE(refused_model(kSmall + hub + "some/model").find("some/model"), std::string::npos);
}

TEST(MegatronFlags, MissingSizesAreNamed) {
  EXPECT_EQ(refused_model("plan --num-layers 2").find("--hidden-size is missing: "), 0U);
  EXPECT_EQ(refused_model("plan --num-layers 2 --hidden-size 8 --num-attention-heads 2")
                .find("--max-position-embeddings is missing: "),
            0U);
  EXPECT_EQ(refused_model(std::string(kSmall) + "--group-query-attention")
                .find("--num-query-groups is missing: "),
            0U);
  EXPECT_EQ(refused_model("plan --num-layers 2 --hidden-size 9 --num-attention-heads 2 "
                          "--max-position-embeddings 8")
                .find("--hidden-size 9 is not a multiple of --num-attention-heads 2"),
            0U);
  EXPECT_EQ(refused_model("plan --bf16").find("--model is missing: "), 0U);
}

// Before anything is made of that size.
TEST(MegatronFlags, SizesThatCannotBeMeantAreRefusedAtOnce) {
  EXPECT_EQ(refusal_of_text("plan --num-layers 2147483647 --hidden-size 64 --num-attention-heads 4 "
                            "--max-position-embeddings 64 --vocab-size 264 --num-experts 8"),
            "--num-layers takes a whole number, 1 to 2000, not '2147483647'.");
}

TEST(MegatronFlags, TheVocabularyIsTheTokenizersFilledUp) {
  const std::string small(kSmall);
  EXPECT_EQ(model_of(small).vocab_size, 384) << "257 of the byte tokenizer, in whole 128s";
  EXPECT_EQ(model_of(small + "--make-vocab-size-divisible-by 1").vocab_size, 257);
  EXPECT_EQ(model_of(small + "--make-vocab-size-divisible-by 50").vocab_size, 300);
  EXPECT_EQ(model_of(small + "--ranks 2 --tensor-model-parallel-size 2").vocab_size, 384)
      << "whatever the layout";
  EXPECT_EQ(model_of(small + "--vocab-size 300").vocab_size, 300);
  EXPECT_EQ(model_of(small + "--vocab-size 300 --make-vocab-size-divisible-by 7").vocab_size, 301);
  EXPECT_EQ(model_of("plan --model mixtral-8x7b --make-vocab-size-divisible-by 7").vocab_size,
            32004);
  const std::string tokenizers = TROUPE_FIXTURE_DIR "/tokenizers/";
  EXPECT_EQ(model_of(small +
                     "--make-vocab-size-divisible-by 1 --tokenizer-type Llama2Tokenizer "
                     "--tokenizer-model " +
                     tokenizers + "bpe/tokenizer.model")
                .vocab_size,
            model_of(small +
                     "--make-vocab-size-divisible-by 1 --tokenizer-type "
                     "SentencePieceTokenizer --tokenizer-model " +
                     tokenizers + "bpe")
                .vocab_size);
  // Only a look at the run may go without the file.
  const Options train = parse_text("train --data-path x --train-iters 1 --lr 1 " + small.substr(5) +
                                   "--tokenizer-type Llama2Tokenizer --tokenizer-model /nowhere/m")
                            .options;
  EXPECT_NE(
      message_of(ExitStatus::bad_request, [&] { load_model_config(train); }).find("/nowhere/m"),
      std::string::npos);
  EXPECT_EQ(refusal_of_text("tokenize --input a --output-prefix b --tokenizer-type Llama2Tokenizer "
                            "--tokenizer-model m")
                .find("--tokenizer-type Llama2Tokenizer: Megatron's begins every document"),
            0U);
}

TEST(MegatronFlags, FilesOfOptionsTakeThem) {
  std::string folder = ::testing::TempDir() + "troupe_flags_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/run.toml";
  const auto with = [&](const std::string& text) {
    std::ofstream(path) << text;
    return "plan --config " + path;
  };
  const CommandLine line = parse_text(
      with("moe-grouped-gemm = true\nvocab_extra_ids = 0\ncuda-graph-modules = [0, 1]\n"));
  EXPECT_EQ(line.notes.size(), 3U);
  EXPECT_EQ(notes_with(line, "--cuda-graph-modules 0 1 is accepted"), 1U);
  EXPECT_EQ(
      refusal_of_text(with("vocab-extra-ids = 5")).find(path + ":1: --vocab-extra-ids 5: only"),
      0U);
  EXPECT_EQ(refusal_of_text(with("mtp-hsm = true")).find(path + ":1: --mtp-hsm: each depth"), 0U);
  EXPECT_EQ(
      refusal_of_text(with("moe-grouped-gemm = 2")).find(path + ":1: moe-grouped-gemm takes no"),
      0U);
  EXPECT_EQ(
      refusal_of_text(with("ckpt-format = [1]")).find(path + ":1: ckpt-format takes one value"),
      0U);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace troupe
