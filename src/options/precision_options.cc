#include "options/precision_options.h"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "ops/exchange/coded_rows/coded_block.h"
#include "options/read_number.h"
#include "options/refuse_without.h"
#include "program/shard.h"

namespace troupe {
namespace {

using Recipe = Fp8Recipe;
using Format = Fp8Format;

Recipe recipe_of(const Options& options) {
  if (options.fp4_format) return Recipe::nvfp4;
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

// The layers that an entry of --fp8-modules names after its colon, which are `text`.
IndexRange layers_of(std::string_view entry, std::string_view text, int32_t layers) {
  const auto refuse = [&] {
    throw_bad_request(fmt::format(
        "--fp8-modules '{}': the layers are 0 to {}; give one, or FIRST-LAST as in experts:2-5, or "
        "FIRST- for all from there on.",
        printable(entry), layers - 1));
  };
  const auto number = [&](std::string_view digits) {
    const int32_t value = read_number<int32_t>(digits).value_or(-1);
    if (value < 0 || value >= layers) refuse();
    return value;
  };
  const size_t dash = text.find('-');
  const int32_t first = number(text.substr(0, dash));
  if (dash == std::string_view::npos) return {.begin = first, .end = first + 1};
  const std::string_view rest = text.substr(dash + 1);
  const int32_t end = rest.empty() ? layers : number(rest) + 1;
  if (end <= first) refuse();
  return {.begin = first, .end = end};
}

// Takes out of `kept` what an entry of --fp8-modules has in 8 bits.
void lower_products_of(std::string_view entry, KeptProducts& kept) {
  const size_t colon = entry.find(':');
  const std::string_view name = entry.substr(0, colon);
  const auto layers = static_cast<int32_t>(kept.size());
  const IndexRange named = colon == std::string_view::npos
                               ? IndexRange{.begin = 0, .end = layers}
                               : layers_of(entry, entry.substr(colon + 1), layers);
  bool is_known = false;
  for (const ProductGroup group : kProductGroups) {
    if (name != kAll && name != name_of(group)) continue;
    is_known = true;
    for (int64_t layer = named.begin; layer < named.end; ++layer) {
      kept[static_cast<size_t>(layer)][static_cast<size_t>(group)] = false;
    }
  }
  if (!is_known) {
    throw_bad_request(fmt::format(
        "--fp8-modules '{}': choose among attention, mlp, shared_experts, experts and all, each "
        "with layers after a colon if not in all of them; or give none or auto alone.",
        printable(entry)));
  }
}

// `layers`: of the model, those of multi-token prediction included.
KeptProducts kept_products_of(const std::vector<std::string>& entries, int32_t layers) {
  const bool is_open = leaves_fp8_modules_open(entries);
  std::array<bool, kProductGroupCount> all{};
  for (const ProductGroup group : kProductGroups) all[static_cast<size_t>(group)] = !is_open;
  KeptProducts kept(static_cast<size_t>(layers), all);
  if (is_open || (entries.size() == 1 && entries[0] == kNone)) return kept;
  for (const std::string& entry : entries) lower_products_of(entry, kept);
  return kept;
}

// The first and last layers that keep their precision whole.
void keep_ends(const Options& options, int32_t layers, KeptProducts& kept) {
  const int32_t first = options.num_layers_at_start_in_bf16.value_or(1);
  const int32_t last = options.num_layers_at_end_in_bf16.value_or(1);
  if (int64_t{first} + last > layers) {
    throw_bad_request(fmt::format(
        "--first-last-layers-bf16: {} layers at the start and {} at the end are more than the {} "
        "that the model has. Give fewer with --num-layers-at-start-in-bf16 and "
        "--num-layers-at-end-in-bf16.",
        first, last, layers));
  }
  for (int32_t layer = 0; layer < layers; ++layer) {
    if (layer < first || layer >= layers - last) kept[static_cast<size_t>(layer)].fill(true);
  }
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

// Each rank has whole blocks of the inner sizes, so that all layouts round alike.
bool stores_activation_inputs_of(const Options& options, const ModelConfig& config) {
  if (!options.activation_func_fp8_input_store) return false;
  constexpr std::string_view kFlag = "--activation-func-fp8-input-store";
  const int64_t tp = options.tensor_model_parallel_size;
  const int64_t etp =
      options.expert_tensor_parallel_size.value_or(options.tensor_model_parallel_size);
  const auto require_blocks = [&](int64_t size, int64_t ranks, std::string_view what) {
    if (size % (kCodedBlock * ranks) == 0) return;
    throw_bad_request(
        fmt::format("{}: {} elements share a scale, and of {}, {}, each rank has no multiple of "
                    "that. Leave it out.",
                    kFlag, kCodedBlock, what, size));
  };
  require_blocks(config.ffn_hidden_size, tp, "the dense layers' inner size");
  require_blocks(config.moe_ffn_hidden_size, etp, "the experts' inner size");
  require_blocks(config.moe_shared_expert_intermediate_size, tp, "the shared experts' inner size");
  const auto refuse_beside = [&](const std::vector<std::string>& modules, std::string_view flag) {
    if (std::find(modules.begin(), modules.end(), "moe_act") == modules.end()) return;
    throw_bad_request(fmt::format(
        "{}: --{} moe_act is about the whole input of the experts' activations, which is not kept "
        "then. Give one of them.",
        kFlag, flag));
  };
  refuse_beside(options.recompute_modules, "recompute-modules");
  refuse_beside(options.offload_modules, "offload-modules");
  return true;
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

std::optional<WeightCodes> weight_codes_of(const Options& options, const ModelConfig& config) {
  if (!options.fp8_param_gather || !options.fp8_format) return std::nullopt;
  const Recipe recipe = recipe_of(options);
  return WeightCodes{.kept = precision_options_of(options, config).kept,
                     .has_blocks = recipe == Recipe::blockwise || recipe == Recipe::mxfp8};
}

PrecisionOptions precision_options_of(const Options& options, const ModelConfig& config) {
  PrecisionOptions chosen{.messages = message_rounding_of(options, config)};
  chosen.stores_activation_inputs = stores_activation_inputs_of(options, config);
  if (options.fp8_format && options.fp4_format) {
    throw_bad_request("--fp4-format and --fp8-format exclude each other; give one of them.");
  }
  if (options.compute_dtype == DType::f16 && (options.fp8_format || options.fp4_format)) {
    throw_bad_request("--fp16: products in 8 or 4 bits are for --bf16. Give one of them.");
  }
  if (!options.fp8_format) {
    refuse_without(options.fp8_recipe.has_value(), "fp8-recipe", "fp8-format");
    refuse_without(options.fp8_param_gather, "fp8-param-gather", "fp8-format");
    refuse_without(options.log_fp8_saturation, "log-fp8-saturation", "fp8-format");
  }
  const bool has_products = options.fp8_format || options.fp4_format;
  if (!has_products) {
    refuse_without(!options.fp8_modules.empty(), "fp8-modules", "fp8-format");
    refuse_without(options.no_fp8_wgrad, "no-fp8-wgrad", "fp8-format");
    refuse_without(options.first_last_layers_bf16, "first-last-layers-bf16", "fp8-format");
  }
  if (!options.fp4_format) {
    refuse_without(options.fp4_recipe.has_value(), "fp4-recipe", "fp4-format");
  }
  if (!options.first_last_layers_bf16) {
    constexpr std::string_view kNeeded = "first-last-layers-bf16";
    refuse_without(options.num_layers_at_start_in_bf16.has_value(), "num-layers-at-start-in-bf16",
                   kNeeded);
    refuse_without(options.num_layers_at_end_in_bf16.has_value(), "num-layers-at-end-in-bf16",
                   kNeeded);
  }
  check_recipe(options);
  if (!has_products) return chosen;
  chosen.recipe = recipe_of(options);
  chosen.delayed = {.amax = options.fp8_amax_compute_algo.value_or(AmaxChoice::most_recent),
                    .margin = options.fp8_margin.value_or(0)};
  chosen.format = options.fp8_format.value_or(Format::e4m3);
  chosen.kept = kept_products_of(options.fp8_modules, config.all_layers());
  chosen.weight_gradients = !options.no_fp8_wgrad;
  chosen.counts_codes = options.log_fp8_saturation;
  if (options.first_last_layers_bf16) keep_ends(options, config.num_layers, chosen.kept);
  return chosen;
}

}  // namespace troupe
