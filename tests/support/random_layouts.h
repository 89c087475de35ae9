// Layouts of up to 16 ranks drawn from everything that is valid: TP with and without sequence
// parallelism, CP in its forms, PP with all schedules and uneven stages, EP and ETP with all
// dispatchers, orders of the ranks, micro-batches, and models with every kind of layer and loss;
// with state sharded or not, collectives early or in their places, with and without overlap,
// recompute, attention within documents, and layers of multi-token prediction in any stages. The
// draw is seeded: a layout has the same number, and the same name, forever.
#pragma once

#include <vector>

#include "support/layout_run.h"

namespace troupe::testing {

// The first `count` of them.
std::vector<LayoutCase> random_layouts(int count);

}  // namespace troupe::testing
