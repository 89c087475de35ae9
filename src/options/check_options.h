// What options must be together, beyond what each must be by itself.
//
// A pure function; any thread.
#pragma once

#include "options/options.h"

namespace troupe {

// Refuses options that contradict each other or that this build cannot honour (bad request).
void check_options(const Options& options);

}  // namespace troupe
