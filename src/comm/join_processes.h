// How a process that a launcher or a person has started finds the other ranks.
//
// Called once, by the thread that the process begins with.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/launch.h"
#include "comm/processes.h"

namespace troupe {

// Joins the other processes: all that the launcher has started must call it, once. `limit`: how
// long they wait for each other, without MPI. Ranks of one machine that were given no secret share
// that of the machine (machine_secret()). A UserError where it fails; see connect_ranks().
std::unique_ptr<Processes> join_processes(const Launch& launch,
                                          std::chrono::milliseconds limit = kRendezvousLimit);

}  // namespace troupe
