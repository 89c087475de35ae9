// Orders in which the operations of a program may run where queues run side by side: any that keep
// the order of each queue and let events be recorded before they are waited for, and in which what
// reaches other ranks keeps its order among all queues.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "passes/queue_events.h"
#include "program/program.h"

namespace troupe::testing {

inline constexpr uint32_t kAsLateAsPossible = 2;

// By the seed modulo 4: any queue at any time; queues other than compute as early as they can; as
// late as they can; now one queue for a while and now another.
std::vector<int32_t> draw_interleaving(const Program& program, std::span<const QueueEvent> events,
                                       uint32_t seed);

}  // namespace troupe::testing
