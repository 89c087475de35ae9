// The messages between a rank's stages of a pipeline and those of other ranks
// (model/pipeline_work.h says when).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "program/builder.h"

namespace troupe {

// Emits the messages of one rank: the residual stream of one micro-batch, or several, one after the
// other (PipelinePartition::streams_into), or its gradient.
class StageMessages {
 public:
  // `shape`: of one stream.
  StageMessages(Builder& builder, DType dtype, const Shape& shape)
      : builder_(builder), dtype_(dtype), shape_(shape) {}

  ValueId receive(int32_t from, int32_t streams, const std::string& name);
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
