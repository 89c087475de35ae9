// `troupe plan --gpus ... --search`: shows what the search found (train/layout_search.h), and
// writes the best as a file of options.
#pragma once

#include "base/error.h"
#include "options/options.h"

namespace troupe {

ExitStatus run_plan_search(const Options& options);

}  // namespace troupe
