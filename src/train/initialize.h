// Initial weights.
#pragma once

#include "base/thread_pool.h"
#include "model/parameters.h"
#include "runtime/state_storage.h"

namespace troupe {

// Fills all parameters (and master weights) with their initial values: a pure function of the seed,
// the same for every number of threads and every layout.
void initialize_parameters(const ModelState& state, const StateStorage& storage, uint64_t seed,
                           ThreadPool& pool);

}  // namespace troupe
