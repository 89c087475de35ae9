// Dispatch plan: which ranks of a group hold experts that a token chose, and the token's place
// among the rows that go to each of them. A token goes once to a rank, however many of the rank's
// experts it chose; where experts are sliced, it goes to every slice.
//
// The n = P S ranks of the group hold E experts: rank p * part_stride + s * slice_stride has slice
// s of experts p * E/P to (p + 1) * E/P - 1. For tokens t and ranks r:
//   slots[t, r] = how many tokens before t go to r      when t goes to r
//               = -1                                    otherwise
//   counts[r]   = how many tokens go to r
// So rows keep the order of their tokens, and need nothing but this rank's own choices.
//
// Kinds
//   dispatch_plan (indices i32 [T, k]) -> counts i32 [n], slots i32 [T, n]
// An index outside [0, E), such as the -1 of a dropped slot, goes nowhere. Integers that stay on
// the device; there is no derivative. Parallel over fixed chunks of tokens.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct DispatchPlanAttributes {
  int32_t experts = 0;      // E
  int32_t parts = 1;        // P, a divisor of E
  int32_t slices = 1;       // S
  int32_t part_stride = 1;  // the strides are 1 and the number of the other kind of rank
  int32_t slice_stride = 1;

  int32_t ranks() const { return parts * slices; }
};

struct DispatchPlan {
  ValueId counts;
  ValueId slots;
};

// Results are named name.counts and name.slots.
DispatchPlan dispatch_plan(Builder& builder, ValueId indices,
                           const DispatchPlanAttributes& attributes, const std::string& name);

extern const OpSpec kDispatchPlan;

}  // namespace troupe
