// What links between ranks reach, measured: the ranks of each machine gather and sum tensors of
// several sizes among each other, then, where there are several machines, each rank with those that
// have its place on the others. A bandwidth and a latency are fitted to the times: those of which
// the plan of time takes its shares (plan/step_time.h).
//
// Errors are UserErrors.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "options/device_options.h"

namespace troupe {

// One collective of one size, on one of the ranks.
struct CollectiveTime {
  std::string_view kind;  // of the operation
  uint64_t bytes = 0;     // of the tensor that is gathered or summed
  double sent_bytes = 0;  // by each rank
  double rounds = 0;      // in which they are sent
  double seconds = 0;
};

// Among ranks of one machine, or across machines.
struct LinkCalibration {
  int32_t ranks = 0;  // that exchanged
  std::vector<CollectiveTime> times = {};
  double bandwidth = 0;  // bytes per second that a rank sends
  double latency = 0;    // seconds
};

struct LinkCalibrations {
  std::optional<LinkCalibration> within_machine;
  std::optional<LinkCalibration> across_machines;
};

// Fills in bandwidth and latency: this latency for each round, and a bandwidth of which collectives
// reach `share`, by the smallest and the largest tensors.
void fit_link(double share, LinkCalibration& link);

// How many programs measure_links() runs on each rank.
uint64_t link_programs(const DeviceSpec& spec, const ProcessGroup& group);

// All ranks of the group call it at once, each on its own thread; each gets what it measured
// itself. Refuses (bad request) machines that do not have as many ranks each, in the order of the
// machines. `done` is called after each program, and may end the work by throwing.
LinkCalibrations measure_links(const DeviceSpec& spec, ProcessGroup& group, int32_t rank,
                               const std::function<void()>& done);

}  // namespace troupe
