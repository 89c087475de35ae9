// How far a piece of work that takes seconds has come: called now and then with what is done of the
// total, in the same unit, from one thread at a time. It may throw to end the work, which then
// leaves nothing half done. An empty one is not called.
#pragma once

#include <cstdint>
#include <functional>

namespace troupe {

using WorkReport = std::function<void(uint64_t done, uint64_t total)>;

}  // namespace troupe
