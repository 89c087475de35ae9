#include "options/moe_options.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "base/error.h"
#include "base/text.h"
#include "options/layer_pattern.h"
#include "options/read_number.h"

namespace troupe {
namespace {

double coefficient(const std::string& text) {
  const double value = read_number<double>(text).value_or(-1);
  if (!(value >= 0) || !std::isfinite(value)) {
    throw_bad_request(fmt::format(
        "--moe-aux-loss-coeff {}: coefficients are numbers of at least 0.", quote_name(text)));
  }
  return value;
}

// The member that holds the coefficient of a kind of loss; null for kinds that have none.
double* loss_of(LoadBalancing type, ModelConfig& config) {
  switch (type) {
    case LoadBalancing::aux_loss:
      return &config.moe_aux_loss_coeff;
    case LoadBalancing::seq_aux_loss:
      return &config.moe_seq_aux_loss_coeff;
    case LoadBalancing::global_aux_loss:
      return &config.moe_global_aux_loss_coeff;
    case LoadBalancing::sinkhorn:
    case LoadBalancing::none:
      return nullptr;
  }
  TROUPE_CHECK(false, "a kind of --moe-router-load-balancing-type");
}

// --moe-router-load-balancing-type and --moe-aux-loss-coeff: lists that go together.
void override_balancing(const Options& options, ModelConfig& config) {
  std::vector<LoadBalancing> types = options.moe_router_load_balancing_type;
  const std::vector<std::string>& coefficients = options.moe_aux_loss_coeff;
  if (types.empty() && coefficients.empty()) return;
  if (types.empty()) types = {LoadBalancing::aux_loss};
  const double models = config.moe_aux_loss_coeff;
  config.moe_aux_loss_coeff = 0;
  config.moe_seq_aux_loss_coeff = 0;
  config.moe_global_aux_loss_coeff = 0;
  config.moe_router_sinkhorn = types[0] == LoadBalancing::sinkhorn;
  if (types.size() == 1 && loss_of(types[0], config) == nullptr) {
    if (std::any_of(coefficients.begin(), coefficients.end(),
                    [](const std::string& text) { return coefficient(text) != 0; })) {
      throw_bad_request(
          fmt::format("--moe-router-load-balancing-type {} has no loss: --moe-aux-loss-coeff must "
                      "be 0 or absent.",
                      value_text(options, "moe-router-load-balancing-type")));
    }
    return;
  }
  if (!coefficients.empty() && coefficients.size() != types.size()) {
    throw_bad_request(
        fmt::format("--moe-router-load-balancing-type names {} losses, --moe-aux-loss-coeff gives "
                    "{} coefficients.",
                    types.size(), coefficients.size()));
  }
  for (size_t i = 0; i < types.size(); ++i) {
    double* target = loss_of(types[i], config);
    if (target == nullptr) {
      throw_bad_request(
          fmt::format("--moe-router-load-balancing-type {}: the types are aux_loss, seq_aux_loss, "
                      "global_aux_loss (one or several of them), sinkhorn, and none.",
                      value_text(options, "moe-router-load-balancing-type")));
    }
    *target = coefficients.empty() ? models : coefficient(coefficients[i]);
  }
}

}  // namespace

void override_moe(const Options& options, ModelConfig& config) {
  if (!options.moe_layer_freq.empty()) {
    if (config.num_experts == 0) {
      throw_bad_request("--moe-layer-freq: this model has no experts (--num-experts).");
    }
    config.moe_layers = parse_moe_layer_freq(options.moe_layer_freq, config.num_layers);
  }
  if (options.moe_router_ignore_padding && config.num_experts == 0) {
    throw_bad_request(
        "--moe-router-ignore-padding: this model has no experts (--num-experts), and so no "
        "routers.");
  }
  if (options.moe_use_upcycling && config.moe_ffn_hidden_size == 0) {
    config.moe_ffn_hidden_size = config.ffn_hidden_size / options.moe_upcycling_granularity;
  }
  override_with(options.moe_ffn_hidden_size, config.moe_ffn_hidden_size);
  override_with(options.moe_shared_expert_intermediate_size,
                config.moe_shared_expert_intermediate_size);
  override_with(options.moe_shared_expert_gate, config.moe_shared_expert_gate);

  override_with(options.moe_router_topk, config.moe_router_topk);
  override_with(options.moe_router_pre_softmax, config.moe_router_pre_softmax);
  override_with(options.moe_router_score_function, config.moe_router_score_function);
  override_with(options.moe_router_num_groups, config.moe_router_num_groups);
  override_with(options.moe_router_group_topk, config.moe_router_group_topk);
  override_with(options.moe_router_topk_scaling_factor, config.moe_router_topk_scaling_factor);
  if (options.moe_router_dtype) config.moe_router_fp64 = options.moe_router_dtype == DType::f64;
  override_with(options.moe_router_enable_expert_bias, config.moe_router_enable_expert_bias);
  override_with(options.moe_router_bias_update_rate, config.moe_router_bias_update_rate);
  override_with(options.moe_input_jitter_eps, config.moe_input_jitter_eps);
  config.moe_router_force_load_balancing = options.moe_router_force_load_balancing;
  override_with(options.moe_router_force_biased, config.moe_router_force_biased);
  override_balancing(options, config);
  override_with(options.moe_z_loss_coeff, config.moe_z_loss_coeff);

  if (options.moe_expert_capacity_factor) {
    config.moe_expert_capacity_factor = std::max(0.0, *options.moe_expert_capacity_factor);
  }
  override_with(options.moe_token_drop_policy, config.moe_token_drop_policy);
  config.moe_pad_expert_input_to_capacity = options.moe_pad_expert_input_to_capacity;
  // 16 rows are what most 8-bit products ask for.
  if (options.moe_router_padding_for_quantization) config.moe_expert_row_multiple = 16;
  override_with(options.moe_expert_row_multiple, config.moe_expert_row_multiple);
}

}  // namespace troupe
