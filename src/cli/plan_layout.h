// What `troupe plan` says of a layout of several ranks: the two meshes and their groups, how
// gradients are reduced, how many parameters each rank holds, and the pipeline's schedule.
#pragma once

#include <string>

#include "model/model_config.h"
#include "train/layout_options.h"
#include "train/options.h"

namespace troupe {

// One line about the model.
std::string describe_model(const Options& options, const ModelConfig& config);

// For people. Worlds of few ranks are listed in full, larger ones in summary.
std::string make_layout_text(const Options& options, const RunLayout& run);

// One JSON document with the same.
std::string make_layout_json(const Options& options, const RunLayout& run);

}  // namespace troupe
