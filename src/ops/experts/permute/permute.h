// Permute: gathers token vectors into the expert-major order of a dispatch plan, one copy for each
// expert that a token chose:
//   y[r] = x[row_slot[r] / k]     for the live rows r of the plan that belong to a slot,
//   y[r] = 0                      for its filler rows, whose row_slot is -1.
//
// Its derivative is combine (the copies' gradients are summed), and combine's derivative is
// permute.
#pragma once

#include <string>

#include "ops/routing/route/route.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// `x`: [T, h] of any float type; if it is ragged, no slot of a token beyond its live rows has a
// row. `routing`: a plan for T tokens, with at most R rows. Returns [R, h] of x's type, ragged with
// the plan's RowCount.
ValueId permute(Builder& builder, ValueId x, const Routing& routing, const std::string& name);

// Inputs: x [T, h], row_slot i32 [R] (ragged; gives the result its row count), slot_row i32 [T, k].
// Output: [R, h], ragged. No attributes.
extern const OpSpec kPermute;

}  // namespace troupe
