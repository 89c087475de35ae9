// Initial weights.
#pragma once

#include "base/thread_pool.h"
#include "model/parameters.h"
#include "runtime/state_storage.h"

namespace troupe {

// Fills the rank's slices of all parameters (and master weights) with their initial values. A value
// is a pure function of the seed and the element's number in the whole tensor, so every number of
// threads and every layout start from the same model, bit for bit.
void initialize_parameters(const ModelState& state, const StateStorage& storage, uint64_t seed,
                           ThreadPool& pool);

}  // namespace troupe
