// What `troupe plan` says of a layout of several ranks: the two meshes and their groups, how
// gradients are reduced, how many parameters each rank holds, the pipeline's schedule, and the
// memory of the ranks' programs where these have been built.
#pragma once

#include <string>

#include "cli/ranks_report.h"
#include "model/model_config.h"
#include "options/options.h"
#include "options/step_spec.h"

namespace troupe {

// One line about the model.
std::string describe_model(const Options& options, const ModelConfig& config);

// For people. Worlds of few ranks are listed in full, larger ones in summary. `report`: null when
// the programs have not been built.
std::string make_layout_text(const Options& options, const StepSpec& step,
                             const RanksReport* report);

// One JSON document with the same.
std::string make_layout_json(const Options& options, const StepSpec& step,
                             const RanksReport* report);

}  // namespace troupe
