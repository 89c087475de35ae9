#include "options/offload_options.h"

#include <fmt/format.h>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "model/blocks/moe.h"
#include "model/modules.h"
#include "options/refuse_without.h"

namespace troupe {
namespace {

void choose_offload_module(const std::string& name, const ModelConfig& config,
                           OffloadOptions& chosen) {
  const ModuleSet modules = modules_named(&ModuleSpec::offload, name);
  if (modules.empty()) {
    throw_bad_request(
        fmt::format("--offload-modules '{}': there is no such module. Choose among {}.",
                    printable(name), module_names(&ModuleSpec::offload)));
  }
  for (const ModuleSpec* module : modules) {
    if (config.num_experts == 0 && chosen_of({&kMoeModule}, module) != nullptr) {
      throw_bad_request(fmt::format(
          "--offload-modules {}: it belongs to experts, and the model has none. Leave it out.",
          name));
    }
    chosen.modules.insert(module);
  }
}

}  // namespace

OffloadOptions offload_options_of(const Options& options, const ModelConfig& config) {
  const OffloadOptions defaults;
  OffloadOptions chosen;
  if (!options.fine_grained_activation_offloading) {
    constexpr std::string_view kNeeded = "fine-grained-activation-offloading";
    refuse_without(!options.offload_modules.empty(), "offload-modules", kNeeded);
    refuse_without(options.min_offloaded_tensor_size != defaults.least_elements,
                   "min-offloaded-tensor-size", kNeeded);
    refuse_without(options.activation_offload_fraction != defaults.fraction,
                   "activation-offload-fraction", kNeeded);
    return chosen;
  }
  if (options.offload_modules.empty()) {
    throw_bad_request(
        "--fine-grained-activation-offloading: say whose inputs go to the host: --offload-modules "
        "with some of " +
        module_names(&ModuleSpec::offload) + ".");
  }
  for (const std::string& name : options.offload_modules)
    choose_offload_module(name, config, chosen);
  chosen.least_elements = options.min_offloaded_tensor_size;
  chosen.fraction = options.activation_offload_fraction;
  return chosen;
}

StashOptions stash_options_of(const Options& options, const ModelConfig& config) {
  const Options defaults;
  if (!options.moe_paged_stash.value_or(false)) {
    constexpr std::string_view kNeeded = "moe-paged-stash";
    refuse_without(options.moe_paged_stash_buffer_size_factor_cuda.has_value(),
                   "moe-paged-stash-buffer-size-factor-cuda", kNeeded);
    refuse_without(options.moe_paged_stash_page_size != defaults.moe_paged_stash_page_size,
                   "moe-paged-stash-page-size", kNeeded);
    return {};
  }
  if (config.num_experts == 0) {
    throw_bad_request(
        "--moe-paged-stash: it belongs to experts, and the model has none. Leave it out.");
  }
  return {.factor = options.moe_paged_stash_buffer_size_factor_cuda.value_or(kUsualStash),
          .page_bytes = int64_t{options.moe_paged_stash_page_size} * config.hidden_size *
                        static_cast<int64_t>(size_of(options.compute_dtype))};
}

double optimizer_offload_of(const Options& options) {
  if (options.optimizer_cpu_offload) return options.optimizer_offload_fraction;
  refuse_without(options.optimizer_offload_fraction != Options{}.optimizer_offload_fraction,
                 "optimizer-offload-fraction", "optimizer-cpu-offload");
  return 0;
}

}  // namespace troupe
