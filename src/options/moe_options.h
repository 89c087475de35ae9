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

// Sets what the flags of router, load balancing, capacity and shared expert say.
void override_moe(const Options& options, ModelConfig& config);

}  // namespace troupe
