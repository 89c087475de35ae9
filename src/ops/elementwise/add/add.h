// Elementwise sum of two tensors: y = a + b, rounded once to their dtype.
//
// Kinds
//   add (a, b) -> y
// All three have the same float dtype, shape and row count; y may be stored over a. Rows beyond the
// live count of ragged tensors are neither read nor written. The gradient of both inputs is the
// gradient of y itself: differentiating emits nothing.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// Emits a + b.
ValueId add(Builder& builder, ValueId a, ValueId b, const std::string& name);

extern const OpSpec kAdd;

}  // namespace troupe
