#include "options/precision_options.h"

#include <fmt/format.h>
#include <string_view>

#include "base/error.h"
#include "options/refuse_without.h"

namespace troupe {
namespace {

using Recipe = Fp8Recipe;
using Format = Fp8Format;

void check_recipe(const Options& options) {
  if (!options.fp8_recipe) {
    throw_bad_request(
        "--fp8-format: say what shares a scale: --fp8-recipe tensorwise, blockwise or mxfp8. "
        "(Megatron's default, delayed, is not available.)");
  }
  if (options.fp8_format == Format::hybrid && options.fp8_recipe != Recipe::tensorwise) {
    throw_bad_request(
        "--fp8-format hybrid: scales of blocks are for e4m3. Use --fp8-format e4m3, or "
        "--fp8-recipe tensorwise.");
  }
}

}  // namespace

PrecisionOptions precision_options_of(const Options& options, const ModelConfig& config) {
  PrecisionOptions chosen;
  if (!options.fp8_format) {
    refuse_without(options.fp8_recipe.has_value(), "fp8-recipe", "fp8-format");
    refuse_without(options.first_last_layers_bf16, "first-last-layers-bf16", "fp8-format");
  }
  if (!options.first_last_layers_bf16) {
    constexpr std::string_view kNeeded = "first-last-layers-bf16";
    refuse_without(options.num_layers_at_start_in_bf16.has_value(), "num-layers-at-start-in-bf16",
                   kNeeded);
    refuse_without(options.num_layers_at_end_in_bf16.has_value(), "num-layers-at-end-in-bf16",
                   kNeeded);
  }
  if (!options.fp8_format) return chosen;
  check_recipe(options);
  chosen.recipe = *options.fp8_recipe;
  chosen.format = *options.fp8_format;
  chosen.layers = config.num_layers;
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
