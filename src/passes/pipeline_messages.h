// What a rank of a pipeline does, step by step, and the messages between its stages and those of
// other ranks.
//
// A send goes on at once, and must be finished later. The earliest place that cannot make ranks
// wait for each other forever is known from the simulated schedule: a serial order of all ranks'
// work exists in which the receive comes first. So a send is finished before the first piece of
// work that begins, on the simulated clock, no earlier than the work that the receiver receives it
// for; what is left is finished at the end.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "model/model_part.h"
#include "program/builder.h"

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

// Emits the messages of one rank. All are of one type: the residual stream of one micro-batch, or
// its gradient.
class StageMessages {
 public:
  StageMessages(Builder& builder, DType dtype, const Shape& shape)
      : builder_(builder), dtype_(dtype), shape_(shape) {}

  ValueId receive(int32_t from, const std::string& name);
  void send(ValueId value, int32_t to);
  // The oldest one to this peer.
  void finish(int32_t peer);
  void finish_all();

 private:
  struct Sent {
    ValueId value;
    Place place;
  };

  Builder& builder_;
  const DType dtype_;
  const Shape shape_;
  std::map<int32_t, std::deque<Sent>> unfinished_;  // by peer
};

}  // namespace troupe
