// Queue events: which operations wait for operations of other queues.
//
// The operations of a queue run one after the other, in the order of the program; the queues of a
// GPU run side by side, each on a stream of its own. A queue begins when the inputs are there, and
// the program ends when all queues have. In between an operation waits for an earlier one of
// another queue where
//   - one of them writes bytes that the other reads or writes. Bytes, not values: state and metrics
//     that are changed in place, row counters, workspace, and memory that the plan gives to one
//     value after the other. So every plan is safe, whatever it reuses.
//   - both reach other ranks (OpSpec::group) by groups of the same queue (queue_of), on whatever
//     queue they are: what ranks exchange over a group has one order on all of them.
// Ranks cannot wait in a circle: in the order of the program all come to the end, one operation at
// a time (verify_collectives()), and here each waits for some of those before it. Scratch memory
// does not count: a GPU has a block for each queue, a CPU runs one operation at a time.
//
// Pure functions; any thread. Their work is linear in operations, operands and the pieces of memory
// that operands cover.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/id_vector.h"
#include "passes/memory_layout.h"
#include "program/program.h"

namespace troupe {

// `after` waits for the event that `before`, an operation of another queue, records at its end.
struct QueueEvent {
  int32_t before = -1;
  int32_t after = -1;
};

// What is needed and nothing else, in the order of `after`: at most one event of each other queue,
// and none that the order of the queues and the other events imply. Empty where one queue does it
// all.
std::vector<QueueEvent> find_queue_events(const Program& program, const MemoryPlan& plan);

// Looks whether all operations that must not run at the same time, or the other way around, are
// kept apart: "operation 7 (add) does not wait for operation 5 (send), which ...", or nothing.
std::optional<std::string> find_queue_fault(const Program& program, const MemoryPlan& plan,
                                            std::span<const QueueEvent> events);

// Aborts with what find_queue_fault() finds.
void verify_queue_events(const Program& program, const MemoryPlan& plan,
                         std::span<const QueueEvent> events);

// For the memory plan: the last operation until which its memory should not be used
// again, because an operation of another queue than compute touches it, which may still run; -1 for
// all other values. See plan_memory().
IdVector<ValueId, int32_t> find_queue_reservations(const Program& program);

}  // namespace troupe
