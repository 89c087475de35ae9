// Combine: brings rows in the expert-major order of a dispatch plan back to their tokens,
//   y[t] = sum over the live slots s of token t of rows[slot_row[t, s]],
// added in ascending order of rows, which is ascending order of experts, in the accumulation type,
// and rounded once. So the sum is the same bits whatever order the router lists the experts in. A
// token without a live slot gets zeros. Filler rows of the plan belong to no token and are not
// read.
//
// Router weights are not applied here: the experts have applied them to their rows already. The
// derivative of combine is permute, and the derivative of permute is combine.
#pragma once

#include <string>

#include "ops/routing/route/route.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// `rows`: [R, h] of any float type, ragged, with as many live rows as the plan has; `routing`: a
// plan for T tokens. Returns [T, h] of the type of `rows`.
ValueId combine(Builder& builder, ValueId rows, const Routing& routing, const std::string& name);

// Inputs: rows [R, h] (ragged), row_slot i32 [R] (ragged; only the derivative needs it),
// slot_row i32 [T, k]. Output: [T, h]. No attributes.
extern const OpSpec kCombine;

}  // namespace troupe
