// The optimizer that the options ask for.
//
// Pure functions; any thread. What cannot be is a UserError (bad request).
#pragma once

#include <memory>

#include "model/model_config.h"
#include "model/model_part.h"
#include "optimizer/optimizer.h"
#include "options/options.h"

namespace troupe {

// Refuses layouts that cut what it keeps or updates. A layout that check_layout() passes.
std::shared_ptr<const Optimizer> optimizer_of(const Options& options, const ModelConfig& config,
                                              const Layout& layout, StateSharding sharding);

}  // namespace troupe
