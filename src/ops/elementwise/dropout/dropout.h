// Dropout (Srivastava et al., 2014), scaled while training: y = x / (1 - p) where the element is
// kept, else 0, rounded once.
//
// Whether an element is kept is a pure function of (seed, substream, the value of `step`, the
// element's index in row-major order); see ops/cpu/dropout_mask.h. Where x has some rows of a
// larger tensor, `origin` says which, and the index is that in the whole. Nothing is saved: the
// gradient of x is the dropout of the gradient of y with the same attributes and step, which draws
// the same mask again. A new step has a new mask, so does a new substream, by which a model names
// the place (layer and position in it, micro-batch). A dropped element is 0 whatever it was, NaN
// included.
//
// Kinds
//   dropout (x of any float dtype and shape, step i64 [1]) -> y, like x
// y may be stored over x. Rows beyond the live count of a ragged x are neither read nor written.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"
#include "program/row_origin.h"

namespace troupe {

struct DropoutAttributes {
  uint64_t seed = 0;
  uint32_t substream = 0;
  double probability = 0;  // p, of dropping: 0 < p < 1
  RowOrigin origin = {};
};

// Emits the dropout of `input` and returns y. With probability 0 nothing is emitted, `step` may be
// invalid, and y is `input`.
ValueId dropout(Builder& builder, ValueId input, ValueId step, const DropoutAttributes& attributes,
                const std::string& name);

extern const OpSpec kDropout;

}  // namespace troupe
