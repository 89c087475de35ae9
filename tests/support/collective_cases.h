// Calls of every collective, of which each rank's results are known to be the same between threads
// and between processes: for tests that compare process groups.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace troupe::testing {

// What all cases give this rank in all of its groups, of which some leave ranks out: the bytes of
// each. The large one only among all ranks, and only if asked for.
std::vector<std::string> run_collective_cases(ProcessGroup& group, int32_t rank, bool with_large);

}  // namespace troupe::testing
