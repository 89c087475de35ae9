// The memory plan: an address for every value of a program, before anything runs.
//
// The plan is the allocation: interpreters allocate exactly these arenas, once, and `troupe plan`
// prints the same numbers. All sizes are multiples of kAlignment.
//
//   state       parameters, gradients, optimizer and router state, by StateId; shared by programs
//   persistent  inputs and metrics of this program
//   transient   activations, workspace and communication buffers; addresses are reused as soon as
//               the last operation that needs a value has run
//   scratch     private memory of each thread, as large as the most demanding operation needs; on a
//               GPU of each queue, whose operations run beside those of the others
//
// What lies in the host's memory (is_on_host(Role), StateTensor::on_host) has arenas of its own,
// one of state and a transient one, planned in the same way. On the CPU that is the same memory.
//
// Micro-batches look alike, so the transient part is planned for each distinct run of operations of
// one stage and micro-batch and repeated. What lives from one run into another takes turns in
// slots: as many as are live at once, so the plan does not grow with the number of micro-batches.
//
// On a GPU queues run side by side, and an operation that reuses memory waits for its last user on
// another queue (queue_events.h). So that the compute queue does not wait for what it has no need
// of, a value that an operation of another queue touches keeps its memory beyond its last use:
// until the first operation of the compute queue that waits for that operation anyway, but no
// longer than to the end of the layer to which compute goes on then, or of the run.
#pragma once

#include "base/device.h"
#include "passes/memory_layout.h"
#include "program/program.h"

namespace troupe {

// Plans the program for a pool of `threads` threads, or for a GPU, whose kernels have no workspace:
// their private memory is scratch, one block for all of a queue. `gpu`: what these are chosen for.
MemoryPlan plan_memory(const Program& program, int threads, Device device = Device::cpu,
                       const DeviceTraits& gpu = {});

// The plan in which every value has its own memory, nothing is reused and nothing is done in place.
// With it an interpreter is the oracle that planned runs are compared with.
MemoryPlan plan_oracle(const Program& program, int threads, Device device = Device::cpu,
                       const DeviceTraits& gpu = {});

// Aborts unless no two values that are live at the same time overlap (a result stored over an
// operand on purpose excepted), and everything lies inside its arena.
void verify_memory_plan(const Program& program, const MemoryPlan& plan);

}  // namespace troupe
