// What kernels reach of the bandwidth of a copy where it is far from what others do
// (kernel_rates.h). Measured in the steps of docs/benchmarks/plan_time.md: on an H100, medians over
// operations of 20 MB and more, or of what there is; on a CPU of two threads.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace troupe {

struct KernelShare {
  std::string_view kind;  // of the operation
  double share = 1;
};

// Above 1: part of what is read is still in the cache, or nothing is written.
inline constexpr std::array kMemoryShares = {
    KernelShare{"add", 1.1},
    KernelShare{"attention_sink_gradient", 0.68},
    KernelShare{"causal_conv", 0.38},
    KernelShare{"causal_conv_gradient", 0.25},
    KernelShare{"causal_conv_weight_gradient", 0.23},
    KernelShare{"embedding", 0.87},
    KernelShare{"gated_delta_rule", 0.12},
    KernelShare{"gated_delta_rule_gradient", 0.066},
    KernelShare{"gated_norm", 0.53},
    KernelShare{"gated_norm_gradient", 0.42},
    KernelShare{"gated_norm_weight_gradient", 0.33},
    KernelShare{"grouped_bias", 0.40},
    KernelShare{"grouped_bias_probability_gradient", 0.28},
    KernelShare{"grouped_bias_weight_gradient", 0.55},
    KernelShare{"join_column_groups", 0.67},
    KernelShare{"linear_bias_gradient", 0.70},
    KernelShare{"load_balancing_loss", 0.12},
    KernelShare{"mla_keys", 0.80},
    KernelShare{"mla_keys_gradient", 0.82},
    KernelShare{"qk_norm_rope_weight_gradient", 0.70},
    KernelShare{"quantize", 0.75},
    // In the same tiles, and so with the same share, which was not measured.
    KernelShare{"quantize_activation", 0.75},
    KernelShare{"quantize_activation_gradient", 0.75},
    KernelShare{"rms_norm_weight_gradient", 0.71},
    KernelShare{"route", 0.03},
    KernelShare{"router_entropy", 0.05},
    KernelShare{"router_topk", 0.04},
    KernelShare{"row_gate", 0.57},
    KernelShare{"row_gate_gradient", 0.57},
    KernelShare{"split_column_groups", 0.67},
    KernelShare{"squared_norm", 1.04},
};

// On CPUs most kinds read and write as fast as a copy, which also fetches what it overwrites; these
// compute more, or have few rows for their threads.
inline constexpr std::array kMemorySharesOfCpu = {
    KernelShare{"causal_conv", 0.33},
    KernelShare{"causal_conv_gradient", 0.16},
    KernelShare{"causal_conv_weight_gradient", 0.20},
    KernelShare{"cross_entropy", 0.42},
    KernelShare{"delta_gates", 0.025},
    KernelShare{"delta_gates_gradient", 0.07},
    KernelShare{"delta_gates_parameter_gradient", 0.03},
    KernelShare{"gated_delta_rule", 0.07},
    KernelShare{"gated_delta_rule_gradient", 0.026},
    KernelShare{"gated_norm", 0.65},
    KernelShare{"gated_norm_gradient", 0.38},
    KernelShare{"gated_norm_weight_gradient", 0.69},
    KernelShare{"join_column_groups", 0.28},
    KernelShare{"load_balancing_loss", 0.015},
    KernelShare{"load_balancing_loss_gradient", 0.028},
    KernelShare{"qk_norm_rope_weight_gradient", 0.44},
    KernelShare{"router_entropy", 0.013},
    KernelShare{"router_topk", 0.016},
    KernelShare{"router_topk_gradient", 0.06},
    KernelShare{"split_column_groups", 0.23},
    KernelShare{"squared_norm", 1.05},
};

// The same in double precision: activations, most of which is an exponential, are slower.
inline constexpr auto kMemorySharesOfCpuInDouble = [] {
  std::array<KernelShare, kMemorySharesOfCpu.size() + 2> shares;
  std::copy(kMemorySharesOfCpu.begin(), kMemorySharesOfCpu.end(), shares.begin());
  shares[kMemorySharesOfCpu.size()] = {"activation", 0.25};
  shares[kMemorySharesOfCpu.size() + 1] = {"activation_gradient", 0.25};
  return shares;
}();

}  // namespace troupe
