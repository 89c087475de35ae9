// Random logits: replaces the router's logits by standard normal numbers, so that tokens spread
// evenly over the experts whatever the router has learned (Megatron Core's
// moe_router_force_load_balancing: for measuring speed). The gradient passes straight through: that
// of the logits is that of the random numbers, although these do not depend on them; so the
// backward pass does its usual work.
//
// Element i is a pure function of (seed, substream, step, i) by the random stream random_logits (i
// counts in the larger tensor of which these are the rows that `origin` says), so a clone of the
// operation computes the same numbers again. Operations that are to differ in a step (layers,
// micro-batches) need different substreams.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"
#include "program/row_origin.h"

namespace troupe {

struct RandomLogitsAttributes {
  uint64_t seed = 0;
  uint32_t substream = 0;  // names layer and micro-batch
  RowOrigin origin = {};
};

// `logits`: any shape, f32 or f64, not ragged, never read; `step`: i64 [1]. The result, like the
// logits, may be stored over them.
ValueId random_logits(Builder& builder, ValueId logits, ValueId step,
                      const RandomLogitsAttributes& attributes, const std::string& name);

// Inputs: logits, step. Output: like the logits.
extern const OpSpec kRandomLogits;

}  // namespace troupe
