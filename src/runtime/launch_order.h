// Which operation launched what a GPU did, where the GPU does not say so: of a graph's kernels it
// tells names and times. They are compared with those of a run in which every launch was attributed
// to its operation: a stream does the same things in the same order again, while several streams
// may come before each other now and after each other then.
//
// Knows nothing of CUDA. Constant once made; borrows the program while it is made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "program/program.h"

namespace troupe {

// A kernel, a copy or a fill.
struct LaunchRecord {
  std::string name;
  uint32_t device = 0;
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
  int32_t op = -1;  // that launched it; -1: none, or not known
};

class LaunchOrder {
 public:
  // `attributed`: of one run, in the order of the beginnings. What no operation launched are inputs
  // and metrics on their way, on the compute queue.
  LaunchOrder(const Program& program, std::span<const LaunchRecord> attributed);

  // Finds the operations of the records that have none, in the order of the beginnings, of another
  // run. Where kernels of one name are on several queues, a record is the one that comes soonest on
  // its queue. What the first run did not have stays as it is.
  void attribute(std::span<LaunchRecord> records) const;

 private:
  // Of one name on one queue.
  struct Launches {
    size_t queue = 0;
    std::vector<int32_t> ops;
    std::vector<int64_t> places;  // among all launches of the queue
  };
  std::map<std::string, std::vector<Launches>> by_name_;
};

}  // namespace troupe
