// What a rank of a pipeline does, step by step, and when its messages are finished.
//
// A send goes on at once, and must be finished later. The earliest place that cannot make ranks
// wait for each other forever is known from the simulated schedule: a serial order of all ranks'
// work exists in which the receive comes first. So a send is finished before the first piece of
// work that begins, on the simulated clock, no earlier than the work that the receiver receives it
// for; what is left is finished at the end.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "model/model_part.h"

namespace troupe {

struct PipelineWork {
  PipelineStep step;
  // Before the step: of each peer named, the oldest send to it that is not finished.
  std::vector<int32_t> finished;
};

// The work of the rank's place in the pipeline, for one training step of the run's schedule with
// `micro_batches`.
std::vector<PipelineWork> training_work(const ModelPart& part, int32_t micro_batches);

// One micro-batch forward, all sends finished at the end.
std::vector<PipelineWork> forward_work(const ModelPart& part);

}  // namespace troupe
