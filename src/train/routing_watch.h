// Watches how evenly experts are used, and says so when it goes wrong.
//
// A router that collapses does not show in the loss for a long time. The watch compares each
// layer's imbalance, number of dead experts and entropy, averaged over the steps since the last
// look, with thresholds, and reports a layer when it crosses one and when it has come back. It also
// counts the steps for which the experts' room did not suffice. Pure bookkeeping; one thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options/run_spec.h"
#include "train/metrics_log.h"

namespace troupe {

// The flags with factors that suffice, each where it is not 0: "--moe-... 1.32 and --moe-... 1.50".
std::string sufficient_room(double room, double stash);

class RoutingWatch {
 public:
  explicit RoutingWatch(const RoutingThresholds& thresholds) : thresholds_(thresholds) {}

  // Takes in one step.
  void add(const StepMetrics& metrics);

  // Lines about layers that have crossed a threshold or come back since the last call; judged over
  // the steps in between. `step` is the last of them.
  std::vector<std::string> look(int64_t step);

 private:
  struct Layer {
    int32_t layer = 0;
    std::vector<int64_t> rows;  // sums
    double entropy = 0;         // sum
    int64_t steps = 0;
    bool unbalanced = false;  // as last reported
    bool dead = false;
    bool collapsed = false;
  };
  // More than one step in a hundred lacked room; said again when the factor that would have
  // sufficed is a quarter larger than the last one said.
  std::string look_at_rooms(int64_t step);

  RoutingThresholds thresholds_;
  std::vector<Layer> layers_;
  int64_t steps_ = 0;
  int64_t steps_without_room_ = 0;
  double room_needed_ = 0;  // the largest so far
  double room_reported_ = 0;
  double stash_needed_ = 0;
  double stash_reported_ = 0;
};

}  // namespace troupe
