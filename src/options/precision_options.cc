#include "options/precision_options.h"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "ops/exchange/coded_rows/coded_rows.h"
#include "options/refuse_without.h"

namespace troupe {
namespace {

using Recipe = Fp8Recipe;
using Format = Fp8Format;

Recipe recipe_of(const Options& options) {
  if (!options.fp8_format) return Recipe::none;
  return options.fp8_recipe.value_or(Recipe::delayed);
}

void check_recipe(const Options& options) {
  const Recipe recipe = recipe_of(options);
  if (options.fp8_format == Format::hybrid && recipe != Recipe::tensorwise &&
      recipe != Recipe::delayed) {
    throw_bad_request(
        "--fp8-format hybrid: scales of blocks are for e4m3. Use --fp8-format e4m3, or "
        "--fp8-recipe tensorwise.");
  }
  if (recipe != Recipe::delayed) {
    constexpr std::string_view kNeeded = "fp8-recipe delayed";
    refuse_without(options.fp8_amax_history_len.has_value(), "fp8-amax-history-len", kNeeded);
    refuse_without(options.fp8_amax_compute_algo.has_value(), "fp8-amax-compute-algo", kNeeded);
    refuse_without(options.fp8_margin.has_value(), "fp8-margin", kNeeded);
  }
}

constexpr std::string_view kAll = "all";
constexpr std::string_view kNone = "none";
constexpr std::string_view kAuto = "auto";

// Which groups of products keep their precision.
std::array<bool, kProductGroupCount> kept_groups_of(const std::vector<std::string>& names) {
  std::array<bool, kProductGroupCount> kept{};
  if (leaves_fp8_modules_open(names) || (names.size() == 1 && names[0] == kAll)) return kept;
  for (const ProductGroup group : kProductGroups) kept[static_cast<size_t>(group)] = true;
  if (names.size() == 1 && names[0] == kNone) return kept;
  for (const std::string& name : names) {
    const auto found = std::find_if(kProductGroups.begin(), kProductGroups.end(),
                                    [&](ProductGroup group) { return name_of(group) == name; });
    if (found == kProductGroups.end()) {
      throw_bad_request(fmt::format(
          "--fp8-modules '{}': choose among attention, mlp, shared_experts, experts; or give all, "
          "none or auto alone.",
          printable(name)));
    }
    kept[static_cast<size_t>(*found)] = false;
  }
  return kept;
}

MessageRounding message_rounding_of(const Options& options, const ModelConfig& config) {
  const MessageRounding messages{
      .dispatched = options.moe_dispatch_fwd_dtype == MessageDtype::mxfp8,
      .combine_gradients = options.moe_combine_bwd_dtype == MessageDtype::mxfp8};
  if (messages.any() && config.hidden_size % kCodedBlock != 0) {
    throw_bad_request(fmt::format(
        "--{} mxfp8: {} elements share a scale, and the hidden size {} is no multiple of that. "
        "Leave it out.",
        messages.dispatched ? "moe-dispatch-fwd-dtype" : "moe-combine-bwd-dtype", kCodedBlock,
        config.hidden_size));
  }
  return messages;
}

}  // namespace

std::string_view name_of(ProductGroup group) {
  switch (group) {
    case ProductGroup::none:
      break;
    case ProductGroup::attention:
      return "attention";
    case ProductGroup::mlp:
      return "mlp";
    case ProductGroup::shared_experts:
      return "shared_experts";
    case ProductGroup::experts:
      return "experts";
  }
  return kNone;
}

bool leaves_fp8_modules_open(const std::vector<std::string>& names) {
  return names.empty() || (names.size() == 1 && names[0] == kAuto);
}

int32_t amax_history_of(const Options& options) {
  return recipe_of(options) == Recipe::delayed ? options.fp8_amax_history_len.value_or(1) : 0;
}

PrecisionOptions precision_options_of(const Options& options, const ModelConfig& config) {
  PrecisionOptions chosen{.messages = message_rounding_of(options, config)};
  if (!options.fp8_format) {
    refuse_without(options.fp8_recipe.has_value(), "fp8-recipe", "fp8-format");
    refuse_without(!options.fp8_modules.empty(), "fp8-modules", "fp8-format");
    refuse_without(options.no_fp8_wgrad, "no-fp8-wgrad", "fp8-format");
    refuse_without(options.first_last_layers_bf16, "first-last-layers-bf16", "fp8-format");
    refuse_without(options.log_fp8_saturation, "log-fp8-saturation", "fp8-format");
  }
  if (!options.first_last_layers_bf16) {
    constexpr std::string_view kNeeded = "first-last-layers-bf16";
    refuse_without(options.num_layers_at_start_in_bf16.has_value(), "num-layers-at-start-in-bf16",
                   kNeeded);
    refuse_without(options.num_layers_at_end_in_bf16.has_value(), "num-layers-at-end-in-bf16",
                   kNeeded);
  }
  check_recipe(options);
  if (!options.fp8_format) return chosen;
  chosen.recipe = recipe_of(options);
  chosen.delayed = {.amax = options.fp8_amax_compute_algo.value_or(AmaxChoice::most_recent),
                    .margin = options.fp8_margin.value_or(0)};
  chosen.format = *options.fp8_format;
  chosen.layers = config.num_layers;
  chosen.kept = kept_groups_of(options.fp8_modules);
  chosen.weight_gradients = !options.no_fp8_wgrad;
  chosen.counts_codes = options.log_fp8_saturation;
  if (!options.first_last_layers_bf16) return chosen;
  chosen.first_layers = options.num_layers_at_start_in_bf16.value_or(1);
  chosen.last_layers = options.num_layers_at_end_in_bf16.value_or(1);
  if (int64_t{chosen.first_layers} + chosen.last_layers > config.num_layers) {
    throw_bad_request(fmt::format(
        "--first-last-layers-bf16: {} layers at the start and {} at the end are more than the {} "
        "that the model has. Give fewer with --num-layers-at-start-in-bf16 and "
        "--num-layers-at-end-in-bf16.",
        chosen.first_layers, chosen.last_layers, config.num_layers));
  }
  return chosen;
}

}  // namespace troupe
