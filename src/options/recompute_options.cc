#include "options/recompute_options.h"

#include <fmt/format.h>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "model/modules.h"

namespace troupe {
namespace {

void choose_module(const std::string& name, const ModelConfig& config, RecomputeOptions& chosen) {
  if (name == "mla_up_proj" && !config.multi_latent_attention) {
    throw_bad_request(
        "--recompute-modules mla_up_proj belongs to multi-latent attention, which this model does "
        "not have.");
  }
  const ModuleSet modules = modules_named(&ModuleSpec::recompute, name);
  chosen.modules.insert(modules.begin(), modules.end());
  if (!modules.empty()) return;
  throw_bad_request(
      fmt::format("--recompute-modules '{}': there is no such module. Choose among {}.",
                  printable(name), module_names(&ModuleSpec::recompute)));
}

// A flag that belongs to another granularity, or to any.
void refuse(bool given, std::string_view flag, std::string_view granularity) {
  if (!given) return;
  throw_bad_request(fmt::format(
      "--{}: it belongs to --recompute-granularity {}. Add that, or leave the flag out.", flag,
      granularity));
}

// Megatron's older flags, which say the same as those of today.
void apply_older_flags(const Options& options, const ModelConfig& config,
                       RecomputeOptions& chosen) {
  const bool granularity_given = options.recompute_granularity.has_value();
  if (options.checkpoint_activations) {
    if (granularity_given || options.moe_layer_recompute) {
      throw_bad_request(
          "--checkpoint-activations recomputes all layers. Leave it out beside "
          "--recompute-granularity and --moe-layer-recompute.");
    }
    chosen.granularity = RecomputeOptions::Granularity::full;
    chosen.method = RecomputeOptions::Method::uniform;
    chosen.layers = 1;
  }
  if (options.moe_layer_recompute) {
    if (options.recompute_granularity == RecomputeOptions::Granularity::full) {
      throw_bad_request(
          "--moe-layer-recompute recomputes experts, --recompute-granularity full whole layers; "
          "give one of them.");
    }
    chosen.granularity = RecomputeOptions::Granularity::selective;
    choose_module("moe", config, chosen);
  }
}

}  // namespace

RecomputeOptions recompute_options_of(const Options& options, const ModelConfig& config) {
  RecomputeOptions chosen;
  apply_older_flags(options, config, chosen);
  const bool full = options.recompute_granularity == RecomputeOptions::Granularity::full;
  const bool selective =
      options.recompute_granularity == RecomputeOptions::Granularity::selective ||
      (options.moe_layer_recompute && !options.recompute_modules.empty());
  if (!full) {
    refuse(options.recompute_method.has_value(), "recompute-method", "full");
    refuse(options.recompute_num_layers.has_value(), "recompute-num-layers", "full");
  }
  if (!selective) refuse(!options.recompute_modules.empty(), "recompute-modules", "selective");
  if (selective) {
    chosen.granularity = RecomputeOptions::Granularity::selective;
    if (options.recompute_modules.empty()) choose_module("core_attn", config, chosen);
    for (const std::string& name : options.recompute_modules) choose_module(name, config, chosen);
  }
  if (!full) return chosen;
  if (!options.recompute_method || !options.recompute_num_layers) {
    throw_bad_request(
        "--recompute-granularity full needs --recompute-method uniform or block, and "
        "--recompute-num-layers.");
  }
  if (*options.recompute_num_layers > config.num_layers) {
    throw_bad_request(fmt::format("--recompute-num-layers {}: the model has {} layers.",
                                  *options.recompute_num_layers, config.num_layers));
  }
  chosen.granularity = RecomputeOptions::Granularity::full;
  chosen.method = *options.recompute_method;
  chosen.layers = *options.recompute_num_layers;
  return chosen;
}

}  // namespace troupe
