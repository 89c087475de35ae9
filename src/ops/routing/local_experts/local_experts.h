// Local experts: of the experts that tokens chose, those that this rank holds, by their numbers
// here:
//
//   y[t, s] = indices[t, s] - first   where first <= indices[t, s] < first + count and row t is
//   live y[t, s] = -1                      otherwise
//
// Which rows are live: all of them, or those of the RowCount of `indices`, or, with `received`, the
// first received[p] rows of the p-th of n equal blocks of rows, one block for each rank that may
// send some. So route can plan for buffers of received rows: what is not live has no expert.
//
// Kinds
//   local_experts (indices i32 [T, k], received i32 [n] or -) -> y i32 [T, k]
// Integers that stay on the device; there is no derivative.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct LocalExpertsAttributes {
  int32_t first = 0;
  int32_t count = 0;
};

// `received`: invalid where the rows are not in blocks. The result is not ragged.
ValueId local_experts(Builder& builder, ValueId indices, ValueId received,
                      const LocalExpertsAttributes& attributes, const std::string& name);

extern const OpSpec kLocalExperts;

}  // namespace troupe
