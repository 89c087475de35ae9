// Ranks that are processes, on one host or several, started by a launcher or by hand: one rank
// each. They exchange messages through MPI, or over TCP where they were started without it
// (Launch).
//
// A failure ends all of them: a rank that fails tells the others, whose calls to the group throw
// the same error. Rank 0 is the one that speaks; if it does not in time, the rank that has failed
// does. Every process then ends with the status of the failure. Through MPI all are ended by force,
// also those that do not answer; over TCP a stopped one finds the others gone when it goes on.
#pragma once

#include <chrono>
#include <string>

#include "base/error.h"
#include "comm/process_group.h"

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

}  // namespace troupe
