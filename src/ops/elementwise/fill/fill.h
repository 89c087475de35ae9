// Constant tensor: every element is `value`, rounded to the tensor's dtype.
//
// Kinds
//   fill () -> y [any shape, any dtype]
// It has no inputs and no derivative.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct FillAttributes {
  double value = 0;
  Shape shape;
  DType dtype = DType::f32;
};

// Emits a tensor of `shape` filled with `value`.
ValueId fill(Builder& builder, double value, DType dtype, const Shape& shape,
             const std::string& name);

extern const OpSpec kFill;

}  // namespace troupe
