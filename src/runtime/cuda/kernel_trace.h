// What the GPU does, and when, as CUPTI records it: kernels, copies and fills, each with the
// operation that launched it where that is known.
//
// Ranks that are threads of one process trace at the same time, each its own GPU. While a trace
// lives, launches take somewhat longer, and the GPU's work does not. Begun and finished by one
// thread; launches of that thread are attributed to operations. Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/launch_order.h"

namespace troupe {

class KernelTrace {
 public:
  // Throws UserError (failed) when CUPTI cannot be used: another profiler uses it, or the driver
  // does not let this user.
  KernelTrace();
  ~KernelTrace();
  KernelTrace(const KernelTrace&) = delete;
  KernelTrace& operator=(const KernelTrace&) = delete;

  // What is launched from begin_op() to end_op() belongs to the operation with this number.
  void begin_op(int32_t op);
  void end_op();

  // Ends the trace. All that was launched on any GPU since the first trace that lives now must have
  // ended. What was done on `device`, in the order of the beginnings; what was launched outside of
  // operations, or by a graph, has none.
  std::vector<LaunchRecord> finish(uint32_t device);

 private:
  void stop();
  bool running_ = false;
};

}  // namespace troupe
