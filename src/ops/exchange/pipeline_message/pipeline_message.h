// Messages between two ranks of a group, as the stages of a pipeline send each other activations
// and their gradients.
//
// Kinds
//   send (x) ->           hands x to `peer` and goes on at once
//   finish_send (x) ->    waits until `peer` has the oldest tensor sent to it that was not waited
//                         for yet, which is x
//   receive () -> y       waits for the oldest tensor that `peer` has sent and this rank has not
//                         received: y [shape], of `dtype`, which are those of the sender's x
// x is any activation, not ragged. finish_send names x, so that its memory stays as it is until the
// receiver has it. Messages have no derivative: what a pipeline differentiates is each stage by
// itself.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct MessageAttributes {
  RankGroup group = RankGroup::pp;
  int32_t peer = 0;  // the other rank's place in the group
};

struct ReceiveAttributes {
  MessageAttributes way = {};
  DType dtype = DType::f32;
  Shape shape = {};
};

// All on the communication queue.
void send(Builder& builder, ValueId x, const MessageAttributes& attributes);
void finish_send(Builder& builder, ValueId x, const MessageAttributes& attributes);
ValueId receive(Builder& builder, const ReceiveAttributes& attributes, const std::string& name);

extern const OpSpec kSend;
extern const OpSpec kFinishSend;
extern const OpSpec kReceive;

}  // namespace troupe
