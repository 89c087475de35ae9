#include "options/model_options.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "io/hf_config.h"
#include "model/window_layers.h"
#include "options/flag_model.h"
#include "options/layer_pattern.h"
#include "options/linear_attention_options.h"
#include "options/loss_scaling.h"
#include "options/moe_options.h"
#include "options/offload_options.h"
#include "options/position_options.h"
#include "options/precision_options.h"
#include "options/recompute_options.h"
#include "options/refuse_without.h"
#include "options/schedule_options.h"
#include "options/shipped_files.h"
#include "options/sparse_attention_options.h"
#include "options/suggest.h"
#include "options/tokenizer_options.h"

namespace troupe {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLettersOfNames = "abcdefghijklmnopqrstuvwxyz_0123456789";

std::string path_of_named_config(const std::string& name) {
  const std::vector<fs::path> configs = shipped_files(".", ".json");
  std::vector<std::string> names;
  for (const fs::path& path : configs) {
    if (path.stem() == name) return path.string();
    names.push_back(path.stem().string());
  }
  const std::string available = names.empty()
                                    ? "No configurations are installed beside this program"
                                    : fmt::format("Names: {}", fmt::join(names, ", "));
  if (name.empty()) {
    throw_bad_request(fmt::format(
        "--model is missing: a name, a config.json, or a folder that holds one. {}. Or describe "
        "the model with --num-layers, --hidden-size, --num-attention-heads and so on.",
        available));
  }
  const std::vector<std::string_view> views(names.begin(), names.end());
  const std::string guess(closest(name, views));
  throw_bad_request(fmt::format(
      "--model {}: there is no such file or folder, and no configuration of that name.{} {}.",
      quote_name(name), guess.empty() ? "" : fmt::format(" Did you mean {}?", guess), available));
}

std::string path_of_config(const std::string& model) {
  std::error_code error;
  const fs::path path(model);
  if (!model.empty() && fs::is_directory(path, error)) {
    const fs::path file = path / "config.json";
    if (!fs::exists(file, error)) {
      throw_bad_request(fmt::format("--model {}: the folder holds no config.json.", model));
    }
    return file.string();
  }
  if (!model.empty() && fs::exists(path, error)) return model;
  return path_of_named_config(model);
}

void override_depth(int32_t num_layers, ModelConfig& config) {
  std::vector<bool>& kinds = config.moe_layers;
  const auto layers = static_cast<size_t>(num_layers);
  const bool uniform =
      std::adjacent_find(kinds.begin(), kinds.end(), std::not_equal_to<>()) == kinds.end();
  if (layers > kinds.size() && config.num_experts > 0 && !uniform) {
    throw_bad_request(
        fmt::format("--num-layers {}: this model has dense and MoE layers, {} in all, and which "
                    "kind the further ones have is not said. Write a config.json instead.",
                    num_layers, config.num_layers));
  }
  if (layers > config.window_layers.size() && !config.window_layers.empty()) {
    throw_bad_request(
        fmt::format("--num-layers {}: this model has layers with a window and layers without, {} "
                    "in all, and which kind the further ones have is not said. Write a config.json "
                    "instead.",
                    num_layers, config.num_layers));
  }
  if (layers > config.linear_attention_layers.size() && !config.linear_attention_layers.empty()) {
    throw_bad_request(
        fmt::format("--num-layers {}: this model has layers with attention and layers with gated "
                    "delta nets, {} in all, and which kind the further ones have is not said. "
                    "Write a config.json instead.",
                    num_layers, config.num_layers));
  }
  if (!config.linear_attention_layers.empty()) config.linear_attention_layers.resize(layers);
  if (!config.window_layers.empty()) config.window_layers.resize(layers);
  config.num_layers = num_layers;
  if (config.num_experts > 0) kinds.resize(layers, kinds.empty() || kinds.back());
}

void override_biases(const Options& options, ModelConfig& config) {
  override_with(options.add_qkv_bias, config.add_qkv_bias);
  override_with(options.add_bias_linear, config.add_bias_linear);
  if (!options.disable_bias_linear) return;
  if (options.add_bias_linear) {
    throw_bad_request("--add-bias-linear and --disable-bias-linear contradict each other.");
  }
  config.add_bias_linear = !*options.disable_bias_linear;
}

// "L,0" or "(L,0)": of Megatron's window, which is that of flash attention, the left half.
int32_t window_of(const std::string& text) {
  int32_t before = -1;
  const size_t begin = text.starts_with('(') ? 1 : 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data() + begin, end, before);
  std::string rest(at, end);
  std::erase(rest, ' ');
  const bool ends = rest == (begin == 1 ? ",0)" : ",0");
  if (error != std::errc() || before < 0 || before == std::numeric_limits<int32_t>::max() ||
      !ends) {
    throw_bad_request(
        fmt::format("--window-size {}: write L,0, for the L keys before a query, such as 127,0.",
                    quote_name(text)));
  }
  return before + 1;
}

void override_window(const Options& options, ModelConfig& config) {
  if (!options.window_size.empty()) config.sliding_window = window_of(options.window_size);
  if (options.window_attn_skip_freq.empty()) return;
  if (config.sliding_window == 0) {
    refuse_without(/*given=*/true, "window-attn-skip-freq", "window-size");
  }
  set_window_layers(parse_window_attn_skip_freq(options.window_attn_skip_freq, config.num_layers),
                    config);
}

// With "--num-experts" for "num_experts": a message about a model as a file of it has the names.
std::string in_terms_of_flags(std::string_view message) {
  std::string text;
  while (!message.empty()) {
    const size_t begin = std::min(message.find_first_of(kLettersOfNames), message.size());
    text += message.substr(0, begin);
    message.remove_prefix(begin);
    const size_t end = std::min(message.find_first_not_of(kLettersOfNames), message.size());
    const std::string_view word = message.substr(0, end);
    const OptionSpec* const option =
        word.find('_') == std::string_view::npos ? nullptr : find_option(word);
    text += option == nullptr ? std::string(word) : flag_of(*option);
    message.remove_prefix(end);
  }
  return text;
}

}  // namespace

std::string config_path_of(const Options& options) {
  const bool by_flags = options.model.empty() && describes_shape(options);
  return by_flags ? "" : path_of_config(options.model);
}

ModelConfig load_model_config(const Options& options, const ModelConfig* base) {
  const bool from_base = base != nullptr && options.model.empty();
  const std::string path = from_base ? "" : config_path_of(options);
  const bool by_flags = !from_base && path.empty();
  ModelConfig config = from_base  ? *base
                       : by_flags ? model_of_flags(options)
                                  : read_hf_config(path);

  if (options.num_layers) override_depth(*options.num_layers, config);
  override_with(options.mtp_num_layers, config.mtp_num_layers);
  override_with(options.mtp_loss_scaling_factor, config.mtp_loss_scaling_factor);
  if (options.mtp_use_repeated_layer) {
    refuse_without(config.mtp_num_layers == 0, "mtp-use-repeated-layer", "mtp-num-layers");
    config.mtp_use_repeated_layer = true;
  }
  if (options.num_experts) {
    const bool was_moe = config.num_experts > 0;
    config.num_experts = *options.num_experts;
    if (config.num_experts == 0) config.moe_layers.clear();
    if (config.num_experts > 0 && !was_moe) {
      config.moe_layers.assign(static_cast<size_t>(config.num_layers), true);
    }
  }
  override_with(options.hidden_size, config.hidden_size);
  override_with(options.ffn_hidden_size, config.ffn_hidden_size);
  override_with(options.num_attention_heads, config.num_attention_heads);
  override_with(options.num_query_groups, config.num_query_groups);
  override_with(options.kv_channels, config.kv_channels);
  // Of a model of flags it may be the tokenizer's, of which the model's was made.
  if (!by_flags || !sizes_the_tokenizer(options)) {
    override_with(options.vocab_size, config.vocab_size);
  }
  if (options.make_vocab_size_divisible_by) {
    config.vocab_size =
        rounded_vocabulary(config.vocab_size, *options.make_vocab_size_divisible_by);
  }
  override_with(options.max_position_embeddings, config.max_position_embeddings);
  override_window(options, config);
  if (options.softmax_type) {
    config.attention_sinks = *options.softmax_type == AttentionSoftmax::learnable;
    config.zero_attention_sinks = *options.softmax_type == AttentionSoftmax::off_by_one;
  }
  override_latent_attention(options, by_flags, config);
  override_linear_attention(options, config);
  override_sparse_attention(options, config);
  override_positions(options, by_flags, config);
  override_with(options.norm_epsilon, config.norm_epsilon);
  override_with(options.init_method_std, config.init_method_std);
  override_with(options.embedding_init_method_std, config.embedding_init_method_std);
  if (options.init_method_xavier_uniform) config.init_method_xavier_uniform = true;
  override_with(options.qk_layernorm, config.qk_layernorm);
  override_with(options.qk_l2_norm, config.qk_l2_norm);
  override_with(options.normalization, config.normalization);
  override_with(options.apply_layernorm_1p, config.zero_centered_gamma);
  override_biases(options, config);
  if (options.activation) {
    config.activation = options.activation->function;
    config.gated_linear_unit = options.activation->gated;
  }
  override_with(options.activation_func_clamp_value, config.activation_clamp);
  override_with(options.glu_linear_offset, config.glu_linear_offset);
  override_with(options.hidden_dropout, config.hidden_dropout);
  override_with(options.attention_dropout, config.attention_dropout);
  override_moe(options, config);
  if (options.untie_embeddings_and_output_weights) {
    config.tie_embeddings = !*options.untie_embeddings_and_output_weights;
  }
  // The flag was for the experts.
  if (by_flags && config.moe_layer_count() == config.num_layers) config.ffn_hidden_size = 0;
  try {
    config.validate();
    config.require_learning_router();
  } catch (const UserError& error) {
    throw UserError(error.status(), in_terms_of_flags(error.what()));
  }
  config.hf_architecture = fitting_hf_architecture(config);
  return config;
}

int32_t sequence_length_of(const Options& options, const ModelConfig& config) {
  const int32_t sequence = options.seq_length.value_or(config.max_position_embeddings);
  if (sequence > config.max_position_embeddings) {
    throw_bad_request(
        fmt::format("--seq-length {} is longer than the model's {} positions "
                    "(--max-position-embeddings).",
                    sequence, config.max_position_embeddings));
  }
  return sequence;
}

ContextExchange context_exchange_of(const Options& options) {
  switch (options.cp_comm_type) {
    case CpCommType::p2p:
      return ContextExchange::p2p;
    case CpCommType::a2a:
      return ContextExchange::a2a;
    case CpCommType::allgather:
      return ContextExchange::allgather;
    case CpCommType::a2a_p2p:
      // It only matters where there are ranks to exchange with.
      if (options.context_parallel_size == 1) return ContextExchange::p2p;
      throw_bad_request(
          "--cp-comm-type a2a+p2p: this version has no exchange in two levels. Use p2p, a2a or "
          "allgather.");
  }
  TROUPE_CHECK(false, "an exchange of --cp-comm-type");
}

TrainingStepOptions training_step_options(const Options& options, const ModelConfig& config) {
  const int32_t sequence = sequence_length_of(options, config);
  // Rows are counted in 32 bits: tokens, and copies of tokens on their way to the experts, from all
  // ranks that share these. (In double, a product of many factors is only inexact.)
  const double ranks =
      static_cast<double>(options.expert_model_parallel_size) *
      options.expert_tensor_parallel_size.value_or(options.tensor_model_parallel_size);
  const double copies = std::max(1, config.moe_router_topk) * ranks;
  if (static_cast<double>(options.micro_batch_size) * sequence * copies >
      std::numeric_limits<int32_t>::max()) {
    throw_bad_request(
        fmt::format("--micro-batch-size {} with sequences of {} tokens is too much for one "
                    "micro-batch. Use a smaller one; --global-batch-size may stay as it is.",
                    options.micro_batch_size, sequence));
  }
  return {.micro_batch_size = options.micro_batch_size,
          .micro_batches = make_batch_sizes(options, sequence).largest() /
                           (options.micro_batch_size * data_parallel_size_of(options)),
          .sequence = sequence,
          .clip_grad = options.clip_grad,
          .skip_norm =
              options.grad_norm_skip_threshold.value_or(std::numeric_limits<double>::infinity()),
          .scale_loss = loss_scaling_of(options).enabled,
          .decoupled_learning_rate = options.decoupled_lr.has_value(),
          .decay_qk_norms =
              options.apply_wd_to_qk_layernorm || !options.no_weight_decay_cond_type.empty(),
          .count_zero_gradients = options.log_num_zeros_in_grad,
          .parameter_norm = options.log_params_norm,
          .seed = static_cast<uint64_t>(options.seed),
          .dispatcher = options.moe_token_dispatcher_type,
          .context_exchange = context_exchange_of(options),
          .per_token_loss = options.calculate_per_token_loss,
          .ignore_padding = options.moe_router_ignore_padding,
          .reset_attention_mask = options.reset_attention_mask,
          .gradient_bucket_elements = options.ddp_bucket_size.value_or(0),
          .overlap_gradient_sums = options.overlap_grad_reduce,
          .overlap_parameter_gathers = options.overlap_param_gather,
          .loss_chunk_tokens = options.loss_chunk_tokens,
          .overlap = {.delay_weight_gradients = options.delay_wgrad_compute,
                      .shared_expert = options.moe_shared_expert_overlap,
                      .multiprocessors = options.moe_flex_dispatcher_num_sms.value_or(0)},
          .precision = precision_options_of(options, config),
          .recompute = recompute_options_of(options, config),
          .offload = offload_options_of(options, config),
          .stash = stash_options_of(options, config),
          .passes = {.skipped = options.skip_passes, .added = {}, .watch = {}}};
}

}  // namespace troupe
