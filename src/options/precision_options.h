// From options to the products of a training step whose operands are in 8 bits
// (passes/precision.h), by Megatron's flags.
//
// Pure function; any thread. Errors are UserErrors (bad request) that name the flag.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/model_config.h"
#include "model/model_part.h"
#include "options/options.h"
#include "passes/precision.h"

namespace troupe {

// Those that --fp8-modules can name, in the order of its help.
inline constexpr std::array kProductGroups = {ProductGroup::attention, ProductGroup::mlp,
                                              ProductGroup::shared_experts, ProductGroup::experts};
std::string_view name_of(ProductGroup group);

// Whether what --fp8-modules says is not yet a choice (train/fp8_module_choice.h). All have
// products in 8 bits then.
bool leaves_fp8_modules_open(const std::vector<std::string>& names);

// RunLayout::amax_history.
int32_t amax_history_of(const Options& options);

// RunLayout::weight_codes.
std::optional<WeightCodes> weight_codes_of(const Options& options, const ModelConfig& config);

PrecisionOptions precision_options_of(const Options& options, const ModelConfig& config);

}  // namespace troupe
