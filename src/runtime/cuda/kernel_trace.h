// What the GPU does, and when, as CUPTI records it: kernels, copies and fills, each with the
// operation that launched it where that is known.
//
// One trace at a time in a process; it sees all GPUs. While a trace lives, launches take somewhat
// longer, and the GPU's work does not. Begun and finished by one thread; launches of that thread
// are attributed to operations. Only in builds with CUDA.
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

  // Ends the trace. All that was launched must have ended. In the order of the beginnings; what was
  // launched outside of operations, or by a graph, has none.
  std::vector<LaunchRecord> finish();

 private:
  void stop();
  bool running_ = false;
};

}  // namespace troupe
