// How fast a layout is and what it takes, by the programs of one rank of each place of its
// pipeline: what `troupe plan --gpus` says, from as few programs as it can be said from.
//
// Where a step has more than two rounds of micro-batches, its bytes are those of two rounds, and
// its time is what one and two rounds take, continued (train/short_step.h).
//
// Pure functions; any thread. What the model or the flags do not allow is a UserError.
#pragma once

#include <cstdint>
#include <string>

#include "model/model_config.h"
#include "options/options.h"
#include "plan/gpu_cluster.h"
#include "plan/step_time.h"

namespace troupe {

struct LayoutTrial {
  uint64_t bytes = 0;  // of the fullest rank; where it does not fit, of one that does not
  bool fits = false;
  double expert_room = 0;   // as RunLayout::expert_room
  double tokens_per_s = 0;  // of each GPU; 0 where it does not fit
  double flops_per_s = 0;   // of the model, of each GPU
  StepTime time;            // where it fits
};

// With --moe-expert-rank-capacity-factor auto the experts have the least room that auto gives and
// that suffices for their load.
LayoutTrial try_out(const Options& options, const ModelConfig& config, const GpuCluster& cluster);

// The bytes of the fullest rank with the room that auto gives; the trial gets both.
void choose_room(const Options& options, const ModelConfig& config, const GpuCluster& cluster,
                 LayoutTrial& trial);

}  // namespace troupe
