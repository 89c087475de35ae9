// How unevenly the experts are loaded where a step's time is planned: --expert-load.
//
// Reads metrics.jsonl of a run (docs/run_folder.md), which may still be written: of its last lines.
// Any thread. Errors are UserErrors (bad request; exit status 1 for a line that is no JSON) that
// name the flag or the line, and what would do.
#pragma once

#include "model/model_config.h"
#include "options/options.h"
#include "plan/expert_load.h"

namespace troupe {

// Refuses what no model can have.
void check_expert_load(const Options& options);

// What --expert-load says of the model. A run must have had as many experts in a layer as it has.
ExpertLoad expert_load_of(const Options& options, const ModelConfig& config);

}  // namespace troupe
