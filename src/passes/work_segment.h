// The segments of a training step's program: what a rank has to do for one micro-batch in one stage
// of the pipeline. Passes over the step find in them what belongs together.
//
// Plain values; the functions may be called from any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/id_vector.h"
#include "parallel/pipeline_schedule.h"

namespace troupe {

struct WorkSegment {
  PipelineStep step;  // forward, backward or data_gradient; weight_gradient: no operations, a place
  int32_t begin = 0;  // the first operation
  int32_t end = 0;    // one after the last
  int32_t differentiated_end = 0;  // of a forward: as `end`, of what the backward differentiates
  // Of a loss in chunks, as emitted: one after each chunk's loss (forward), and after its
  // gradients, with which the backward begins.
  std::vector<int32_t> chunk_ends = {};
};

// Calls visit(forward, backward) for each micro-batch and stage, in the order of the backwards.
template <class Visit>
void for_each_backward(std::span<const WorkSegment> segments, const Visit& visit) {
  for (const WorkSegment& backward : segments) {
    const PipelineStep& step = backward.step;
    if (step.action != PipelineAction::backward && step.action != PipelineAction::data_gradient) {
      continue;
    }
    const auto forward =
        std::find_if(segments.begin(), segments.end(), [&](const WorkSegment& each) {
          return each.step.action == PipelineAction::forward && each.step.chunk == step.chunk &&
                 each.step.micro_batch == step.micro_batch;
        });
    TROUPE_CHECK(forward != segments.end(), "a backward has a forward before it");
    visit(*forward, backward);
  }
}

// Where the segments are in a new order: by operation, and for the end, what is before it there.
inline void move_segments(std::vector<WorkSegment>& segments, const OpVector<int32_t>& new_begins) {
  for (WorkSegment& segment : segments) {
    segment.begin = new_begins[segment.begin];
    segment.end = new_begins[segment.end];
    segment.differentiated_end = new_begins[segment.differentiated_end];
  }
}

}  // namespace troupe
