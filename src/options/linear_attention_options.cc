#include "options/linear_attention_options.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "options/layer_pattern.h"
#include "options/moe_options.h"
#include "options/refuse_without.h"

namespace troupe {

void override_linear_attention(const Options& options, ModelConfig& config) {
  override_with(options.attention_output_gate, config.attention_output_gate);
  const bool has_pattern = !options.linear_attention_freq.empty();
  std::vector<bool>& layers = config.linear_attention_layers;
  const bool is_asked = options.experimental_attention_variant == AttentionVariant::gated_delta_net;
  if (is_asked && layers.empty()) {
    refuse_without(!has_pattern, "experimental-attention-variant", "linear-attention-freq");
    config.linear_conv_kernel_dim = 4;
    config.linear_key_head_dim = 128;
    config.linear_value_head_dim = 128;
    config.linear_num_key_heads = 16;
    config.linear_num_value_heads = 32;
  } else if (layers.empty()) {
    constexpr std::string_view kNeeded = "experimental-attention-variant gated_delta_net";
    refuse_without(has_pattern, "linear-attention-freq", kNeeded);
    refuse_without(options.linear_conv_kernel_dim.has_value(), "linear-conv-kernel-dim", kNeeded);
    refuse_without(options.linear_key_head_dim.has_value(), "linear-key-head-dim", kNeeded);
    refuse_without(options.linear_value_head_dim.has_value(), "linear-value-head-dim", kNeeded);
    refuse_without(options.linear_num_key_heads.has_value(), "linear-num-key-heads", kNeeded);
    refuse_without(options.linear_num_value_heads.has_value(), "linear-num-value-heads", kNeeded);
    return;
  }
  if (has_pattern) {
    layers = parse_linear_attention_freq(options.linear_attention_freq, config.num_layers);
  }
  override_with(options.linear_conv_kernel_dim, config.linear_conv_kernel_dim);
  override_with(options.linear_key_head_dim, config.linear_key_head_dim);
  override_with(options.linear_value_head_dim, config.linear_value_head_dim);
  override_with(options.linear_num_key_heads, config.linear_num_key_heads);
  override_with(options.linear_num_value_heads, config.linear_num_value_heads);
  // All layers have attention: a model without delta nets.
  if (std::find(layers.begin(), layers.end(), true) == layers.end()) {
    layers.clear();
    config.linear_conv_kernel_dim = config.linear_key_head_dim = config.linear_value_head_dim =
        config.linear_num_key_heads = config.linear_num_value_heads = 0;
  }
}

}  // namespace troupe
