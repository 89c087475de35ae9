// Which part of the model and of the work on it is one rank's: the layout of the run, and the
// rank's place in it. Plain values; any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "parallel/layout.h"
#include "parallel/pipeline_partition.h"
#include "parallel/pipeline_schedule.h"

namespace troupe {

// The same for all ranks: the two meshes, the stages of the pipeline, the order of its work.
struct RunLayout {
  Layout layout;
  PipelinePartition partition;
  PipelineShape schedule;  // its micro-batches are those of one step and one pipeline
};

// All of `layers` layers on one rank.
RunLayout layout_of_one_rank(int32_t layers);

struct ModelPart {
  std::shared_ptr<const RunLayout> run;
  int32_t rank = 0;

  const Layout& layout() const { return run->layout; }
  const PipelinePartition& partition() const { return run->partition; }
  DensePlace dense() const { return layout().dense_place(rank); }
  ExpertPlace expert() const { return layout().expert_place(rank); }
  // Do the ranks of a tp group share the tokens between their products?
  bool sequence_parallel() const {
    return layout().options().sequence_parallel && layout().tp() > 1;
  }
  // The stage that is this rank's chunk number `chunk`.
  const PipelineStage& stage(int32_t chunk) const {
    return partition().stages[static_cast<size_t>(
        stage_at(partition().placement, partition().ranks, {dense().pp, chunk}))];
  }
};

}  // namespace troupe
