#include "options/position_options.h"

#include <optional>
#include <string_view>

#include "base/error.h"
#include "ops/attention/rope/length_factor.h"
#include "options/moe_options.h"
#include "options/refuse_without.h"

namespace troupe {
namespace {

void refuse_yarn_flags(const Options& options) {
  constexpr std::string_view kNeeded = "rope-type yarn";
  refuse_without(options.rotary_scaling_factor.has_value(), "rotary-scaling-factor", kNeeded);
  refuse_without(options.yarn_original_max_position_embeddings.has_value(),
                 "yarn-original-max-position-embeddings", kNeeded);
  refuse_without(options.yarn_beta_fast.has_value(), "yarn-beta-fast", kNeeded);
  refuse_without(options.yarn_beta_slow.has_value(), "yarn-beta-slow", kNeeded);
  refuse_without(options.yarn_correction_range_round_to_int.has_value(),
                 "yarn-correction-range-round-to-int", kNeeded);
  refuse_without(options.no_yarn_correction_range_round_to_int.has_value(),
                 "no-yarn-correction-range-round-to-int", kNeeded);
  refuse_without(options.mscale.has_value(), "mscale", kNeeded);
  refuse_without(options.mscale_all_dim.has_value(), "mscale-all-dim", kNeeded);
}

// Megatron's defaults of yarn, which stretch nothing.
void begin_yarn(ModelConfig& config) {
  config.rope_scaling_type = RopeScalingKind::yarn;
  config.rope_scaling_factor = 1;
  config.rope_original_positions = 4096;
  config.rope_scaling_fast = 32;
  config.rope_scaling_slow = 1;
  config.rope_round_range = true;
  config.rope_mscale = 1;
  config.rope_mscale_all_dim = 0;
  config.rope_attention_factor = 0;
}

void end_scaling(ModelConfig& config) {
  const ModelConfig unset;
  config.rope_scaling_type = unset.rope_scaling_type;
  config.rope_scaling_factor = unset.rope_scaling_factor;
  config.rope_original_positions = unset.rope_original_positions;
  config.rope_scaling_fast = unset.rope_scaling_fast;
  config.rope_scaling_slow = unset.rope_scaling_slow;
  config.rope_round_range = unset.rope_round_range;
  config.rope_mscale = unset.rope_mscale;
  config.rope_mscale_all_dim = unset.rope_mscale_all_dim;
  config.rope_attention_factor = unset.rope_attention_factor;
}

void override_yarn(const Options& options, ModelConfig& config) {
  override_with(options.rotary_scaling_factor, config.rope_scaling_factor);
  override_with(options.yarn_original_max_position_embeddings, config.rope_original_positions);
  override_with(options.yarn_beta_fast, config.rope_scaling_fast);
  override_with(options.yarn_beta_slow, config.rope_scaling_slow);
  override_with(options.yarn_correction_range_round_to_int, config.rope_round_range);
  if (options.no_yarn_correction_range_round_to_int) {
    config.rope_round_range = !*options.no_yarn_correction_range_round_to_int;
  }
  override_with(options.mscale, config.rope_mscale);
  override_with(options.mscale_all_dim, config.rope_mscale_all_dim);
  if (!options.mscale && !options.mscale_all_dim) return;
  // In Megatron 0 is a value; a config.json that has it says nothing.
  const double factor = config.rope_scaling_factor;
  const bool is_said = config.rope_mscale > 0 && config.rope_mscale_all_dim > 0;
  const bool is_default = config.rope_mscale == 1 && config.rope_mscale_all_dim == 0;
  config.rope_attention_factor = is_said || is_default
                                     ? 0
                                     : length_factor(factor, config.rope_mscale) /
                                           length_factor(factor, config.rope_mscale_all_dim);
}

}  // namespace

void override_latent_attention(const Options& options, bool by_flags, ModelConfig& config) {
  override_with(options.multi_latent_attention, config.multi_latent_attention);
  if (!config.multi_latent_attention) {
    constexpr std::string_view kNeeded = "multi-latent-attention";
    refuse_without(options.q_lora_rank.has_value(), "q-lora-rank", kNeeded);
    refuse_without(options.kv_lora_rank.has_value(), "kv-lora-rank", kNeeded);
    refuse_without(options.qk_head_dim.has_value(), "qk-head-dim", kNeeded);
    refuse_without(options.qk_pos_emb_head_dim.has_value(), "qk-pos-emb-head-dim", kNeeded);
    refuse_without(options.v_head_dim.has_value(), "v-head-dim", kNeeded);
    return;
  }
  if (by_flags) {
    config.kv_lora_rank = 32;
    config.qk_head_dim = 128;
    config.qk_pos_emb_head_dim = 64;
    config.v_head_dim = 128;
    config.rotary_interleaved = true;
  }
  override_with(options.q_lora_rank, config.q_lora_rank);
  override_with(options.kv_lora_rank, config.kv_lora_rank);
  override_with(options.qk_head_dim, config.qk_head_dim);
  override_with(options.qk_pos_emb_head_dim, config.qk_pos_emb_head_dim);
  override_with(options.v_head_dim, config.v_head_dim);
  config.kv_channels = config.qk_head_dim + config.qk_pos_emb_head_dim;
  if (!options.num_query_groups) config.num_query_groups = config.num_attention_heads;
}

void override_positions(const Options& options, bool by_flags, ModelConfig& config) {
  override_with(options.rotary_base, config.rotary_base);
  override_with(options.rotary_percent, config.rotary_percent);
  std::optional<RopeScalingKind> kind = options.rope_type;
  const bool yarn_by_name = options.position_embedding_type == RopeScalingKind::yarn;
  if (yarn_by_name && kind == RopeScalingKind::none) {
    throw_bad_request("--position-embedding-type yarn and --rope-type rope contradict each other.");
  }
  if (yarn_by_name || (!kind && by_flags && config.multi_latent_attention)) {
    kind = RopeScalingKind::yarn;
  }
  const bool is_linear = options.rotary_seq_len_interpolation_factor.value_or(1) != 1;
  if (is_linear + options.use_rope_scaling + (kind == RopeScalingKind::yarn) > 1) {
    throw_bad_request(
        "--rope-type yarn, --use-rope-scaling and --rotary-seq-len-interpolation-factor are three "
        "ways to stretch positions: choose one.");
  }
  if (kind == RopeScalingKind::none) end_scaling(config);
  if (kind == RopeScalingKind::yarn && config.rope_scaling_type != RopeScalingKind::yarn) {
    begin_yarn(config);
  }
  if (is_linear) {
    end_scaling(config);
    config.rope_scaling_type = RopeScalingKind::linear;
    config.rope_scaling_factor = *options.rotary_seq_len_interpolation_factor;
  }
  if (options.use_rope_scaling) {
    end_scaling(config);
    config.rope_scaling_type = RopeScalingKind::llama3;
    config.rope_scaling_factor = 8;
    config.rope_original_positions = 8192;
    config.rope_scaling_fast = 4;
    config.rope_scaling_slow = 1;
  }
  if (config.rope_scaling_type == RopeScalingKind::llama3) {
    override_with(options.rope_scaling_factor, config.rope_scaling_factor);
  } else {
    refuse_without(options.rope_scaling_factor.has_value(), "rope-scaling-factor",
                   "use-rope-scaling");
  }
  if (config.rope_scaling_type != RopeScalingKind::yarn) return refuse_yarn_flags(options);
  override_yarn(options, config);
  if (config.rope_scaling_factor == 1 && config.rope_attention_factor == 0) end_scaling(config);
}

}  // namespace troupe
