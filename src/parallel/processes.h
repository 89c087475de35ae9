// Ranks that are processes, on one host or several, started together by a launcher of MPI (mpirun,
// srun): one rank each.
//
// A failure ends all of them: whoever fails tells the others, whose calls to the group then throw
// the same error. Rank 0 is the one that speaks; if it does not in time, the rank that has failed
// does. Then all processes are ended by force, with the status of the failure, also those that do
// not answer.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/error.h"
#include "parallel/process_group.h"

namespace troupe {

class Processes {
 public:
  virtual ~Processes() = default;

  // This process's rank, and the number of processes.
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // The group of all processes. It belongs to this object. To be called once.
  virtual ProcessGroup& group(std::chrono::milliseconds limit) = 0;

  // One of the two ends a process. finish() waits until all the others come to it, too, and throws
  // if one of them fails instead; nothing can be done with the group afterwards.
  virtual void finish() = 0;
  // Says what has failed, once for all ranks, and does not return.
  [[noreturn]] virtual void fail(ExitStatus status, const std::string& message) = 0;
};

// Joins the other processes: all that the launcher has started must call it, once. A bad request if
// this build has no MPI.
std::unique_ptr<Processes> join_processes();

// The MPI library, as it calls itself; empty: this build has none.
std::string mpi_library();

}  // namespace troupe
