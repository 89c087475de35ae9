#include "options/device_options.h"

#include <algorithm>

#include "base/error.h"
#include "base/machine.h"

namespace troupe {

int DeviceSpec::thread_count() const {
  return threads > 0 ? threads : usable_cores();
}

int DeviceSpec::threads_per_rank() const {
  return std::max(1, thread_count() / ranks);
}

DeviceSpec device_spec_of(const Options& options) {
  return {.device = options.device,
          .ranks = options.ranks,
          .ranks_per_gpu = options.ranks_per_gpu,
          .threads = options.threads,
          .capture_graphs = options.cuda_graph_impl != CudaGraphs::none,
          .collective_timeout = std::chrono::seconds(options.collective_timeout_s)};
}

}  // namespace troupe
