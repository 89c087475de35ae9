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

// With a bias, each expert's logits have one more random number added, the same for all tokens
// (Megatron Core's moe_router_force_biased: for measuring an imbalance):
//   logits[t, e] = normal(t, e) + |bias| * normal(e)
// normal(e) is drawn from the stream logit_bias for (seed, bias_substream), and for the step unless
// `bias` is negative: so all micro-batches and ranks of a step have the same.
struct RandomLogitsAttributes {
  uint64_t seed = 0;
  uint32_t substream = 0;  // names layer and micro-batch
  RowOrigin origin = {};
  double bias = 0;              // its deviation; 0: none
  uint32_t bias_substream = 0;  // names the layer
};

// `logits`: any shape, f32 or f64, not ragged, never read; `step`: i64 [1]. The result, like the
// logits, may be stored over them.
ValueId random_logits(Builder& builder, ValueId logits, ValueId step,
                      const RandomLogitsAttributes& attributes, const std::string& name);

// Inputs: logits, step. Output: like the logits.
extern const OpSpec kRandomLogits;

}  // namespace troupe
