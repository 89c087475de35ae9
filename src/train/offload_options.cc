#include "train/offload_options.h"

#include <array>
#include <fmt/format.h>
#include <string_view>

#include "base/error.h"
#include "base/text.h"

namespace troupe {
namespace {

struct ModuleName {
  std::string_view name;
  bool OffloadOptions::*member;
  bool of_experts = false;
};
constexpr std::array kModules = {
    ModuleName{"attn_norm", &OffloadOptions::attention_norm},
    ModuleName{"qkv_linear", &OffloadOptions::qkv},
    ModuleName{"core_attn", &OffloadOptions::core_attention},
    ModuleName{"attn_proj", &OffloadOptions::attention_out},
    ModuleName{"mlp_norm", &OffloadOptions::mlp_norm},
    ModuleName{"expert_fc1", &OffloadOptions::expert_fc1, /*of_experts=*/true},
    ModuleName{"moe_act", &OffloadOptions::expert_activation, /*of_experts=*/true},
};

void choose_module(const std::string& name, const ModelConfig& config, OffloadOptions& chosen) {
  std::string known;
  for (const ModuleName& module : kModules) {
    known += fmt::format("{}{}", known.empty() ? "" : ", ", module.name);
    if (name != module.name) continue;
    if (module.of_experts && config.num_experts == 0) {
      throw_bad_request(fmt::format(
          "--offload-modules {}: it belongs to experts, and the model has none. Leave it out.",
          name));
    }
    chosen.*module.member = true;
    return;
  }
  throw_bad_request(fmt::format("--offload-modules '{}': there is no such module. Choose among {}.",
                                printable(name), known));
}

// A flag that needs another one.
void refuse(bool given, std::string_view flag, std::string_view needed) {
  if (!given) return;
  throw_bad_request(
      fmt::format("--{}: it belongs to --{}. Add that, or leave the flag out.", flag, needed));
}

}  // namespace

OffloadOptions offload_options_of(const Options& options, const ModelConfig& config) {
  const OffloadOptions defaults;
  OffloadOptions chosen;
  if (!options.fine_grained_activation_offloading) {
    constexpr std::string_view kNeeded = "fine-grained-activation-offloading";
    refuse(!options.offload_modules.empty(), "offload-modules", kNeeded);
    refuse(options.min_offloaded_tensor_size != defaults.least_elements,
           "min-offloaded-tensor-size", kNeeded);
    refuse(options.activation_offload_fraction != defaults.fraction, "activation-offload-fraction",
           kNeeded);
    return chosen;
  }
  if (options.offload_modules.empty()) {
    throw_bad_request(
        "--fine-grained-activation-offloading: say whose inputs go to the host: --offload-modules "
        "with some of attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act.");
  }
  for (const std::string& name : options.offload_modules) choose_module(name, config, chosen);
  chosen.least_elements = options.min_offloaded_tensor_size;
  chosen.fraction = options.activation_offload_fraction;
  return chosen;
}

double optimizer_offload_of(const Options& options) {
  if (options.optimizer_cpu_offload) return options.optimizer_offload_fraction;
  refuse(options.optimizer_offload_fraction != Options{}.optimizer_offload_fraction,
         "optimizer-offload-fraction", "optimizer-cpu-offload");
  return 0;
}

}  // namespace troupe
