// Jitter: multiplies each element by a random factor near 1, the noise of Switch Transformer's
// router input (Fedus, Zoph and Shazeer, 2021; Megatron Core's moe_input_jitter_eps):
//   y_i = x_i * (1 + epsilon * u_i),   u_i uniform in [-1, 1)
// computed in the accumulation dtype of x and rounded once to its dtype.
//
// u_i is a pure function of (seed, substream, step, i) by the random stream router_noise, with i
// the element's index in the tensor, or in the larger one of which it has the rows that `origin`
// says. So a clone of the operation computes the same numbers again,
// and the gradient, dx_i = dy_i * (1 + epsilon * u_i), is this operation itself applied to dy:
// nothing is saved. Operations that are to differ in a step (layers, micro-batches) need different
// substreams.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"
#include "program/row_origin.h"

namespace troupe {

struct JitterAttributes {
  uint64_t seed = 0;
  uint32_t substream = 0;  // names layer and micro-batch
  double epsilon = 0;      // 0 < epsilon < 1
  RowOrigin origin = {};
};

// `input`: any shape, f64, f32 or bf16, not ragged; `step`: i64 [1]. The result may be stored over
// the input.
ValueId jitter(Builder& builder, ValueId input, ValueId step, const JitterAttributes& attributes,
               const std::string& name);

// Inputs: input, step. Output: like the input.
extern const OpSpec kJitter;

}  // namespace troupe
