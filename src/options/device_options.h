// From options to what the ranks of a run compute with.
//
// A plain value and a pure function; any thread.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/device.h"
#include "options/options.h"

namespace troupe {

struct DeviceSpec {
  Device device = Device::cpu;
  int32_t ranks = 1;
  int32_t ranks_per_gpu = 1;    // N ranks of a machine share each GPU
  int32_t threads = 0;          // of a machine; 0: its cores
  bool capture_graphs = false;  // training steps become CUDA graphs; without meaning on a CPU
  std::chrono::milliseconds collective_timeout{10'000};  // of ranks that are threads (ThreadGroup)

  // Threads of a machine to compute with: those above, or all cores this process may use.
  int thread_count() const;
  // Each rank's part of them where all ranks are on one machine; at least one.
  int threads_per_rank() const;
};

DeviceSpec device_spec_of(const Options& options);

}  // namespace troupe
