// Adds a bias to rows: y[t, n] = x[t, n] + b[n]. For products whose bias cannot be added with the
// product (linear's own bias), because the product's result is summed over ranks first.
//
// x and y [T, N] and b [N] have the same floating-point dtype; the sum is in the accumulation dtype
// and rounded once. Nothing is ragged.
//
// Kinds
//   add_bias (x, b) -> y, may be stored over x
// The gradient of x is that of y; the gradient of b is linear_bias_gradient
// (ops/products/linear/linear.h).
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// Emits the sum. With an invalid bias nothing is emitted, and the result is `x`.
ValueId add_bias(Builder& builder, ValueId x, ValueId bias, const std::string& name);

extern const OpSpec kAddBias;

}  // namespace troupe
