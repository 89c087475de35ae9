// The options of routing, balancing and capacity, and of which layers have experts, applied to a
// model's shape: the part of model_options.h that speaks of experts. Pure functions; any thread.
// Errors are UserErrors (bad request) that name the flag.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "options/options.h"

namespace troupe {

// A flag that was given replaces what the model's configuration says.
template <class T>
void override_with(const std::optional<T>& flag, T& field) {
  if (flag) field = *flag;
}

// Which of `layers` layers have experts, as --moe-layer-freq writes it: "N" for layer i with
// i mod N = 0, or a list of 0 and 1 with one entry per layer, in which lists are joined by "+",
// repeated by "*N" and grouped by parentheses, as in "([0]*3+[1]*58)".
std::vector<bool> parse_moe_layer_freq(const std::string& pattern, int32_t layers);

// Sets what the flags of router, load balancing, capacity and shared expert say.
void override_moe(const Options& options, ModelConfig& config);

}  // namespace troupe
