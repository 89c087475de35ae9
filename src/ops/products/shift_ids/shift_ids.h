// Shifts ids: y[t] = ids[t] - first, so that ids of a part of the vocabulary that begins at `first`
// count from 0. An id below `first` becomes negative; the result saturates at the least i32.
//
// Kinds
//   shift_ids (ids i32 [T]) -> i32 [T], may be stored over ids
// Integers only; there is no derivative.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct ShiftIdsAttributes {
  int32_t first = 0;  // >= 0
};

// Emits the shift; with first = 0 nothing is emitted, and the result is `ids`.
ValueId shift_ids(Builder& builder, ValueId ids, const ShiftIdsAttributes& attributes,
                  const std::string& name);

extern const OpSpec kShiftIds;

}  // namespace troupe
