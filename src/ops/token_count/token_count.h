// Token count: the sum of a mask, that is of the weights that tokens have in the loss.
//
// Kinds
//   token_count (mask [T]) -> [1]
// f64 or f32; summed in double, in order, and rounded once. A mask has no gradient.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

ValueId token_count(Builder& builder, ValueId mask, const std::string& name);

extern const OpSpec kTokenCount;

}  // namespace troupe
