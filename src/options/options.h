// Options: every option of every command in one struct, and the one table that describes them.
//
// The command line, --help, docs/options.md, the list printed when a run starts and the JSON saved
// in checkpoints all come from option_table(). To add an option: a member here, a line there.
// Flags have Megatron's names where Megatron has them.
//
// Options is a plain value; the tables are constant. Everything here may be called from any thread.
// Errors are UserErrors that name the flag.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/device.h"
#include "base/dtype.h"
#include "data/tokenize_corpus.h"
#include "io/hf_quantization.h"
#include "model/dispatcher.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/optimizer/muon/muon.h"
#include "ops/optimizer/newton_schulz/newton_schulz.h"
#include "ops/precision/recipe.h"
#include "ops/routing/expert_capacity/expert_capacity.h"
#include "ops/routing/router_topk/score_function.h"
#include "options/choices.h"
#include "options/schedules.h"
#include "parallel/pipeline_schedule.h"
#include "parallel/refusal.h"
#include "passes/pass_pipeline.h"
#include "passes/recompute.h"
#include "program/op.h"

namespace troupe {

// Of this program, as it stands in checkpoints and in `troupe --version`.
inline constexpr std::string_view kVersion = "0.1.0";

enum class Command : uint32_t {
  train,
  eval,
  generate,
  tokenize,
  convert,
  verify,
  inspect,
  plan,
  bench,
  report,
  doctor,
  help,
};

// A set of commands.
using CommandMask = uint32_t;
constexpr CommandMask mask_of(Command command) {
  return CommandMask{1} << static_cast<uint32_t>(command);
}

struct CommandInfo {
  Command command = Command::help;
  std::string_view name;
  std::string_view summary;  // one line
  std::string_view example;  // a complete command line
};

// In the order in which people meet them.
std::span<const CommandInfo> command_table();
const CommandInfo& info_of(Command command);

// Whether the command runs on the ranks of a layout: threads, or processes of a launcher.
bool runs_on_ranks(Command command);

// Ranks that may run as threads of one process.
inline constexpr int32_t kMostThreadRanks = 1024;

// --cuda-graph-impl. Graphs of parts (Megatron's) mean one of the whole iteration.
enum class CudaGraphs : uint8_t { none, full_iteration, local, transformer_engine };

// --gpu-exchange; automatic: see staged_groups_of() (options/layout_options.h).
enum class GpuExchange : uint8_t { automatic, peer, nccl };

// The function of dense layers and experts, and whether a gate is multiplied with it.
struct MlpActivation {
  ActivationFunction function = ActivationFunction::silu;
  bool gated = true;

  bool operator==(const MlpActivation&) const = default;
};

// --softmax-type.
// What rows of tokens are on their way between ranks: as they are computed, or 8 bits.
// Of products in 4 bits; there is one of each.
enum class Fp4Format : uint8_t { e2m1 };
enum class Fp4Recipe : uint8_t { nvfp4 };
enum class MessageDtype : uint8_t { bf16, mxfp8 };

enum class AttentionSoftmax : uint8_t { vanilla, off_by_one, learnable };

enum class LoadBalancing : uint8_t { aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none };

// --cp-comm-type; a2a_p2p is Megatron's exchange in two levels, which is not available.
enum class CpCommType : uint8_t { p2p, a2a, allgather, a2a_p2p };

enum class OptimizerKind : uint8_t { adam, muon, dist_muon };

// --muon-tp-mode.
// What some or all layers have instead of dense attention.
enum class AttentionVariant : uint8_t { gated_delta_net, sparse };
enum class MuonTpMode : uint8_t { duplicated, blockwise, distributed };

// --program of `inspect`.
enum class ProgramKind : uint8_t { train, eval };

// --completion of `help`.
enum class Shell : uint8_t { bash, zsh, fish };

// A member that is `optional` is unset unless the flag was given (or the saved JSON had it); what
// unset means is the spec's `unset` text. An empty string is unset, too.
struct Options {
  Command command = Command::help;

  // Global.
  std::string config;  // a file of options
  Device device = Device::cpu;
  CudaGraphs cuda_graph_impl = CudaGraphs::full_iteration;
  int32_t ranks = 1;
  int32_t ranks_per_gpu = 1;
  GpuExchange gpu_exchange = GpuExchange::automatic;
  int32_t collective_timeout_s = 10;
  int32_t rendezvous_timeout_s = 60;
  std::string rendezvous_secret_file;
  int32_t threads = 0;      // 0: see DeviceSpec
  std::string cpu_kernels;  // a level of ops/kernel_level.h
  bool json = false;
  bool quiet = false;
  bool verbose = false;

  // Model: a shape, and changes to it.
  std::string model;
  std::optional<int32_t> num_layers;
  std::optional<int32_t> mtp_num_layers;
  std::optional<double> mtp_loss_scaling_factor;
  bool mtp_use_repeated_layer = false;
  std::optional<int32_t> hidden_size;
  std::optional<int32_t> ffn_hidden_size;
  std::optional<int32_t> num_attention_heads;
  std::optional<int32_t> num_query_groups;
  bool group_query_attention = false;
  std::optional<int32_t> kv_channels;
  std::optional<int32_t> vocab_size;
  std::optional<int32_t> make_vocab_size_divisible_by;
  std::optional<int32_t> max_position_embeddings;
  std::optional<int32_t> num_experts;
  std::optional<int32_t> moe_ffn_hidden_size;
  std::optional<int32_t> moe_router_topk;
  std::optional<bool> moe_router_pre_softmax;
  std::optional<double> rotary_base;
  std::optional<double> rotary_percent;
  std::optional<RopeScalingKind> position_embedding_type;
  std::optional<RopeScalingKind> rope_type;
  std::optional<double> rotary_seq_len_interpolation_factor;
  bool use_rope_scaling = false;
  std::optional<double> rope_scaling_factor;
  std::optional<double> rotary_scaling_factor;
  std::optional<int32_t> yarn_original_max_position_embeddings;
  std::optional<double> yarn_beta_fast;
  std::optional<double> yarn_beta_slow;
  std::optional<bool> yarn_correction_range_round_to_int;
  std::optional<bool> no_yarn_correction_range_round_to_int;
  std::optional<double> mscale;
  std::optional<double> mscale_all_dim;
  std::string window_size;
  std::string window_attn_skip_freq;
  std::optional<AttentionSoftmax> softmax_type;
  std::optional<bool> multi_latent_attention;
  std::optional<int32_t> q_lora_rank;
  std::optional<int32_t> kv_lora_rank;
  std::optional<int32_t> qk_head_dim;
  std::optional<int32_t> qk_pos_emb_head_dim;
  std::optional<int32_t> v_head_dim;
  std::optional<bool> attention_output_gate;
  std::optional<AttentionVariant> experimental_attention_variant;
  std::string linear_attention_freq;
  std::optional<int32_t> linear_conv_kernel_dim;
  std::optional<int32_t> linear_key_head_dim;
  std::optional<int32_t> linear_value_head_dim;
  std::optional<int32_t> linear_num_key_heads;
  std::optional<int32_t> linear_num_value_heads;
  std::optional<int32_t> dsa_indexer_topk;
  std::optional<int32_t> dsa_indexer_n_heads;
  std::optional<int32_t> dsa_indexer_head_dim;
  std::optional<double> dsa_indexer_k_norm_epsilon;
  std::optional<double> dsa_indexer_loss_coeff;
  std::optional<bool> dsa_indexer_use_sparse_loss;
  std::optional<double> norm_epsilon;
  std::optional<double> init_method_std;
  std::optional<double> embedding_init_method_std;
  bool init_method_xavier_uniform = false;
  std::optional<bool> qk_layernorm;
  std::optional<bool> qk_l2_norm;
  std::optional<bool> untie_embeddings_and_output_weights;
  std::optional<Normalization> normalization;
  std::optional<bool> apply_layernorm_1p;
  std::optional<bool> add_qkv_bias;
  std::optional<bool> add_bias_linear;
  std::optional<bool> disable_bias_linear;
  std::optional<MlpActivation> activation;
  std::optional<double> activation_func_clamp_value;
  std::optional<double> glu_linear_offset;
  std::optional<double> hidden_dropout;
  std::optional<double> attention_dropout;
  DType compute_dtype = DType::f32;

  // Mixture of Experts: router, balancing, capacity, shared expert.
  std::string moe_layer_freq;
  std::optional<int32_t> moe_shared_expert_intermediate_size;
  std::optional<bool> moe_shared_expert_gate;
  std::optional<ScoreFunction> moe_router_score_function;
  std::optional<int32_t> moe_router_num_groups;
  std::optional<int32_t> moe_router_group_topk;
  std::optional<double> moe_router_topk_scaling_factor;
  std::optional<DType> moe_router_dtype;
  std::vector<LoadBalancing> moe_router_load_balancing_type;
  std::vector<std::string> moe_aux_loss_coeff;
  std::optional<double> moe_z_loss_coeff;
  std::optional<bool> moe_router_enable_expert_bias;
  std::optional<double> moe_router_bias_update_rate;
  std::optional<double> moe_input_jitter_eps;
  bool moe_router_force_load_balancing = false;
  std::optional<double> moe_router_force_biased;
  std::optional<double> moe_expert_capacity_factor;
  std::optional<DropPolicy> moe_token_drop_policy;
  bool moe_pad_expert_input_to_capacity = false;
  std::optional<double> moe_expert_rank_capacity_factor;
  int32_t moe_expert_clones = 0;
  bool moe_router_padding_for_quantization = false;
  bool moe_router_ignore_padding = false;
  std::optional<int32_t> moe_expert_row_multiple;
  TokenDispatcher moe_token_dispatcher_type = TokenDispatcher::allgather;
  std::optional<int32_t> moe_dispatch_ranks_per_node;
  double warn_load_imbalance = 0;
  double warn_dead_experts = 0;
  double warn_router_entropy = 0;

  // Parallel layout.
  int32_t tensor_model_parallel_size = 1;
  bool sequence_parallel = false;
  int32_t context_parallel_size = 1;
  CpCommType cp_comm_type = CpCommType::p2p;
  int32_t pipeline_model_parallel_size = 1;
  std::optional<int32_t> num_layers_per_virtual_pipeline_stage;
  std::optional<int32_t> num_virtual_stages_per_pipeline_rank;
  std::string pipeline_model_parallel_layout;
  PipelineSchedule pipeline_schedule = PipelineSchedule::one_f_one_b;
  std::optional<int32_t> microbatch_group_size_per_virtual_pipeline_stage;
  int32_t expert_model_parallel_size = 1;
  std::optional<int32_t> expert_tensor_parallel_size;
  bool use_distributed_optimizer = false;
  bool use_megatron_fsdp = false;
  std::optional<StateSharding> data_parallel_sharding_strategy;  // empty: optim_grads_params
  int32_t num_distributed_optimizer_instances = 1;
  bool overlap_grad_reduce = false;
  bool overlap_param_gather = false;
  std::optional<int64_t> ddp_bucket_size;
  bool calculate_per_token_loss = false;
  bool overlap_moe_expert_parallel_comm = false;
  bool delay_wgrad_compute = false;
  bool moe_shared_expert_overlap = false;
  std::optional<int32_t> moe_flex_dispatcher_num_sms;
  std::string rank_order = "tp-cp-ep-dp-pp";
  bool fake_process_group = false;
  std::string gpus;                  // see gpu_cluster_of()
  std::string expert_load = "even";  // see expert_load_of()
  std::string hardware;              // see hardware_of()
  bool search = false;
  int32_t search_top = 5;
  std::string search_output;
  std::string calibrate;               // the file that bench writes
  std::optional<double> train_tokens;  // of the run that is planned
  std::optional<int32_t> decoder_first_pipeline_num_layers;
  std::optional<int32_t> decoder_last_pipeline_num_layers;
  bool account_for_embedding_in_pipeline_split = false;
  bool account_for_loss_in_pipeline_split = false;

  // Low precision.
  std::optional<Fp8Format> fp8_format;
  std::optional<Fp8Recipe> fp8_recipe;
  std::optional<Fp4Format> fp4_format;
  std::optional<Fp4Recipe> fp4_recipe;
  std::vector<std::string> fp8_modules;  // empty: open
  MessageDtype moe_dispatch_fwd_dtype = MessageDtype::bf16;
  MessageDtype moe_combine_bwd_dtype = MessageDtype::bf16;
  bool activation_func_fp8_input_store = false;
  std::optional<int32_t> fp8_amax_history_len;
  std::optional<AmaxChoice> fp8_amax_compute_algo;
  std::optional<int32_t> fp8_margin;
  bool no_fp8_wgrad = false;
  bool fp8_param_gather = false;
  bool first_last_layers_bf16 = false;
  std::optional<int32_t> num_layers_at_start_in_bf16;
  std::optional<int32_t> num_layers_at_end_in_bf16;

  // Memory.
  std::optional<RecomputeOptions::Granularity> recompute_granularity;
  std::vector<std::string> recompute_modules;
  std::optional<RecomputeOptions::Method> recompute_method;
  std::optional<int32_t> recompute_num_layers;
  bool moe_layer_recompute = false;
  bool checkpoint_activations = false;
  bool fine_grained_activation_offloading = false;
  std::vector<std::string> offload_modules;
  int64_t min_offloaded_tensor_size = 1024 * 1024;  // elements
  double activation_offload_fraction = 1.0;
  std::optional<bool> moe_paged_stash;
  std::optional<double> moe_paged_stash_buffer_size_factor_cuda;  // times what is expected
  int32_t moe_paged_stash_page_size = 64;                         // rows of the hidden size
  bool optimizer_cpu_offload = false;
  double optimizer_offload_fraction = 1.0;
  int32_t loss_chunk_tokens = 0;

  // Data.
  std::vector<std::string> data_path;  // see parse_data_path()
  std::string data_args_path;          // a file with what data_path would hold
  std::vector<std::string> train_data_path;
  std::vector<std::string> test_data_path;
  std::string per_split_data_args_path;
  bool mock_data = false;
  std::string split = "969,30,1";
  std::optional<int32_t> seq_length;
  std::string tokenizer_type = "byte";
  std::string tokenizer_model;
  std::string vocab_file;
  std::string merge_file;
  std::string tiktoken_pattern = "v2";
  int32_t tiktoken_num_special_tokens = 1000;
  std::optional<int32_t> null_tokenizer_eod_id;
  bool eod_mask_loss = false;
  bool reset_attention_mask = false;
  bool keep_partial_validation_sample = false;

  // Training.
  int32_t micro_batch_size = 1;
  std::optional<int32_t> global_batch_size;
  std::string rampup_batch_size;
  std::string step_batch_size_schedule;
  bool decrease_batch_size_if_needed = false;
  std::optional<int64_t> train_iters;    // in `train`, either this
  std::optional<int64_t> train_samples;  // or this is set
  std::optional<double> lr;              // set in `train`
  double min_lr = 0.0;
  std::optional<double> decoupled_lr;
  std::optional<double> decoupled_min_lr;
  LrDecayStyle lr_decay_style = LrDecayStyle::linear;
  std::optional<int64_t> lr_decay_iters;
  std::optional<int64_t> lr_decay_samples;
  double lr_warmup_init = 0.0;
  std::optional<double> lr_warmup_fraction;
  int64_t lr_warmup_iters = 0;
  int64_t lr_warmup_samples = 0;
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::exponential;
  std::optional<int64_t> lr_wsd_decay_iters;
  std::optional<int64_t> lr_wsd_decay_samples;
  bool override_opt_param_scheduler = false;
  bool use_checkpoint_opt_param_scheduler = false;
  double weight_decay = 0.01;
  std::optional<double> start_weight_decay;
  std::optional<double> end_weight_decay;
  IncreaseStyle weight_decay_incr_style = IncreaseStyle::constant;
  bool apply_wd_to_qk_layernorm = false;
  std::string no_weight_decay_cond_type;
  OptimizerKind optimizer = OptimizerKind::adam;
  double muon_momentum = 0.9;
  bool muon_nesterov = false;
  MuonScale muon_scale_mode = MuonScale::spectral;
  double muon_extra_scale_factor = 1.0;
  NewtonSchulzCoefficients muon_coefficient_type = NewtonSchulzCoefficients::quintic;
  int32_t muon_num_ns_steps = 5;
  NewtonSchulzArithmetic muon_fp32_matmul_prec = NewtonSchulzArithmetic::bf16;
  bool muon_no_split_qkv = false;
  MuonTpMode muon_tp_mode = MuonTpMode::duplicated;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  bool use_precision_aware_optimizer = false;
  DType main_grads_dtype = DType::f32;
  bool grad_reduce_in_bf16 = false;
  DType exp_avg_dtype = DType::f32;
  DType exp_avg_sq_dtype = DType::f32;
  std::optional<double> loss_scale;
  double initial_loss_scale = 4294967296.0;
  double min_loss_scale = 1;
  int64_t loss_scale_window = 1000;  // steps
  int64_t hysteresis = 2;            // steps
  double clip_grad = 1.0;            // 0: no clipping
  int64_t max_skipped_steps = 20;    // in a row; 0: no limit
  std::optional<double> grad_norm_skip_threshold;
  bool check_for_large_grads = false;
  std::vector<std::string> iterations_to_skip;
  int64_t seed = 1234;

  // Checkpoints and evaluation.
  std::string save;
  bool no_save = false;
  std::string load;
  int32_t max_shard_megabytes = 5000;  // as the hub's own tools split
  std::optional<HfWeightType> dtype;   // of the files; empty: the model's
  std::optional<int64_t> save_interval;
  double save_interval_minutes = 15;  // 0: not by the clock
  bool no_save_optim = false;
  bool no_save_rng = false;
  int32_t keep_checkpoints = 0;  // 0: all
  std::optional<int64_t> save_retain_interval;
  bool save_best = false;
  std::optional<int64_t> ckpt_step;
  bool no_load_optim = false;
  bool no_load_rng = false;
  bool use_checkpoint_args = false;
  bool allow_changed_data = false;
  bool exit_on_missing_checkpoint = false;
  std::vector<std::string> valid_data_path;  // each "PREFIX" or "NAME=PREFIX"
  bool multiple_validation_sets = false;
  std::optional<int64_t> eval_interval;
  int64_t eval_iters = 100;  // 0: no evaluation
  std::optional<int32_t> eval_micro_batch_size;
  std::optional<int32_t> eval_global_batch_size;
  std::optional<int64_t> exit_after_step;
  std::optional<int64_t> exit_interval;
  std::optional<double> exit_duration_in_mins;
  bool exit_signal_handler = false;
  int64_t log_interval = 1;
  bool log_num_zeros_in_grad = false;
  bool log_params_norm = false;
  bool log_fp8_saturation = false;
  std::string tensorboard_dir;
  bool log_memory_to_tensorboard = false;
  bool log_timers_to_tensorboard = false;
  bool finetune = false;
  std::string pretrained_checkpoint;
  bool moe_use_upcycling = false;
  int32_t moe_upcycling_granularity = 1;

  // Generation.
  std::string prompt;
  int32_t max_new_tokens = 200;
  double temperature = 0.8;
  int32_t top_k = 0;
  double top_p = 0.0;

  // Tokenizing.
  std::vector<std::string> input;
  std::string output_prefix;
  CorpusFormat input_format = CorpusFormat::by_extension;
  std::string json_keys = "text";
  int32_t split_documents = 0;
  bool append_eod = false;
  bool overwrite = false;

  // Looking inside.
  std::string hf_dir;  // positional of `verify`
  bool oracle = false;
  bool profile = false;
  int32_t profile_step_start = 10;
  int32_t profile_step_end = 12;
  std::vector<std::string> profile_ranks;  // empty: 0
  std::string profile_dir = "profile";
  std::optional<int32_t> layer;
  std::optional<int32_t> micro_batch;
  std::optional<Phase> phase;
  int32_t rank = 0;
  ProgramKind program = ProgramKind::train;
  bool passes = false;
  std::optional<PassId> dump_after;
  std::vector<PassId> skip_passes;
  std::string op;
  std::string html;
  std::vector<std::string> measured;

  // Reports.
  std::vector<std::string> runs;  // positional of `report`
  std::string output;

  // Help.
  std::string topic;  // positional of `help`
  bool markdown = false;
  bool man = false;
  std::optional<Shell> completion;

  // The names of the options that the command line or --config said. Not an option itself.
  std::vector<std::string_view> given;
};

// Whether the command line or --config said the option of this name.
bool was_given(const Options& options, std::string_view name);

// Options per member type. A vector collects all values of a flag, given once or several times.
using OptionMember =
    std::variant<bool Options::*, int32_t Options::*, int64_t Options::*, double Options::*,
                 std::string Options::*, std::vector<std::string> Options::*,
                 std::optional<bool> Options::*, std::optional<int32_t> Options::*,
                 std::optional<int64_t> Options::*, std::optional<double> Options::*, ChoiceMember>;

// The numbers an option takes. Both ends belong to it, unless `above_min` or `below_max`.
struct OptionRange {
  double min = std::numeric_limits<double>::lowest();
  double max = std::numeric_limits<double>::max();
  bool above_min = false;
  bool below_max = false;
};

struct OptionSpec {
  std::string_view name = {};  // of the flag, without dashes
  std::string_view also = {};  // other names that Megatron has for it, separated by blanks
  OptionMember member = {};
  std::optional<Setting> setting = {};  // what lower rooms call it where they refuse it
  std::string_view group = {};
  std::string_view metavar =
      {};  // what stands for the value in the help: "N", "DIR"; empty: no value
  std::string_view help = {};
  std::string_view unset = {};       // optional members and strings: what happens when unset
  std::string_view unset_word = {};  // optional members: the value that leaves them unset
  OptionRange range = {};
  // Strings and lists of strings only; others have them in their ChoiceMember (choices_of()).
  std::span<const std::string_view> choices = {};
  CommandMask commands = 0;
  CommandMask required = 0;         // the commands that do not run without it
  std::string_view instead = {};    // flags that may be given instead of it, separated by blanks
  std::string_view shorthand = {};  // not empty: takes no value and sets the member to this string
  bool positional = false;          // given without the flag's name
  int32_t values = 1;               // strings only: up to N may follow the flag, joined with blanks
  bool collects =
      false;  // lists only: a repeated flag adds to the values instead of replacing them
};

// Whether look(name) holds for the name, or for another one that it has.
template <class Look>
bool any_name(const OptionSpec& spec, const Look& look) {
  if (look(spec.name)) return true;
  for (std::string_view rest = spec.also; !rest.empty();) {
    const std::string_view other = rest.substr(0, rest.find(' '));
    if (look(other)) return true;
    rest.remove_prefix(std::min(rest.size(), other.size() + 1));
  }
  return false;
}

// Grouped: the options of a group stand together.
std::span<const OptionSpec> option_table();

inline bool takes(Command command, const OptionSpec& spec) {
  return (spec.commands & mask_of(command)) != 0;
}
inline bool requires_option(Command command, const OptionSpec& spec) {
  return (spec.required & mask_of(command)) != 0;
}

// Whether one of two flags may be given instead of the other, or both instead of a third: they are
// not given together.
bool exclude_each_other(const OptionSpec& first, const OptionSpec& second);

// A flag without a value sets its member (or the shorthand's) all by itself.
bool needs_value(const OptionSpec& spec);

// Several values may follow the flag.
bool is_list(const OptionSpec& spec);

// The texts that the option takes; empty: any that its type and range allow.
std::span<const std::string_view> choices_of(const OptionSpec& spec);

// "--hidden-size"; "HF_DIR" for a positional.
std::string flag_of(const OptionSpec& spec);

// Reads `text` into the option's member: adds to a vector, replaces anything else. A text of the
// wrong type, out of range or not among the choices is a bad request. `text` of an option that
// needs no value is "true" or "false".
void set_option(Options& options, const OptionSpec& spec, std::string_view text);

// The value as a person would type it. Empty when unset.
std::string value_text(const Options& options, const OptionSpec& spec);
// The same of the option that has this name.
std::string value_text(const Options& options, std::string_view name);

// The option of that name or other name, hyphens and underscores being the same; null when there is
// none.
const OptionSpec* find_option(std::string_view name);

// "1 to 64", "at least 0", "cpu or cuda"; empty when anything goes.
std::string range_text(const OptionSpec& spec);

// A flag describes a shape, so that --model may be missing.
bool describes_shape(const Options& options);

// The options of options.command with their values, as one JSON object with the flags' names; unset
// ones are null. "command" holds the command's name.
std::string to_json(const Options& options);

// Sets what `text`, written by to_json, holds, the command included; members it does not name keep
// their values. Text that to_json cannot have written (not JSON, unknown names, values out of
// range) is `failed`; the message names `path`.
void from_json(Options& options, std::string_view text, const std::string& path);

// The options of options.command that are set, as a TOML file that --config reads; not --config
// itself.
std::string to_toml(const Options& options);

// Those of Options::given alone, without a heading.
std::string given_to_toml(const Options& options);

// An option whose values differ.
struct OptionDifference {
  const OptionSpec* spec = nullptr;
  std::string before;  // value_text()
  std::string after;
};

// The options of `after.command` in which the two differ.
std::vector<OptionDifference> differences(const Options& before, const Options& after);

// All options of options.command, for the start of a run: grouped, aligned, one line each, with a
// star at those that differ from their default. Ends with a newline.
std::string describe(const Options& options);

// The flags of options.command that differ from their defaults, with their values, as they would
// be typed: "--lr 0.003".
std::vector<std::string> changed_flags(const Options& options);

// Replicas that --ranks leaves for different samples: over the sizes of TP, CP and PP. At least 1,
// also where these do not divide the ranks, which Layout refuses.
int32_t data_parallel_size_of(const Options& options);

// Samples of one step where it has one size: --global-batch-size (with
// --decrease-batch-size-if-needed the multiple of one micro-batch of each rank below it), or one
// micro-batch of each rank.
int32_t global_batch_size_of(const Options& options);

}  // namespace troupe
