// Room for the rows of a rank's experts. How many rows come to a rank depends on the data; memory
// is planned for a bound. These operations see to it that the bound holds: either by finding that
// it would not, for all ranks alike and before anything is sent, or by letting tokens go in rounds
// that are small enough for any routing.
//
// Kinds
//   limit_expert_rows (indices i32 [T, k], loads i32 [E]) -> kept i32 [T, k], over i32 [1],
//                                                            fullest i32 [1]
//       E experts in P equal parts, each of which is on a rank of its own; loads[e] counts the
//       slots of all ranks that chose expert e. fullest = the largest sum of the loads of a part
//       over    = 1 if fullest > rows, otherwise 0
//       kept    = indices if over = 0, otherwise -1 everywhere
//   keep_tokens (indices i32 [T, k]) -> kept i32 [T, k]
//       kept[t, s] = indices[t, s] for first <= t < first + count, otherwise -1
// Integers that stay on the device; there is no derivative. Since all ranks that share the experts
// have the same loads, they decide alike: where there is too little room, none sends anything, and
// the step is void (passes/step_update.h).
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct LimitExpertRowsAttributes {
  int32_t parts = 1;  // P, a divisor of E
  int64_t rows = 0;   // that a part has room for
};

struct LimitedRows {
  ValueId kept;
  ValueId over;
  ValueId fullest;
};

// Results are named `name`, name.over and name.fullest.
LimitedRows limit_expert_rows(Builder& builder, ValueId indices, ValueId loads,
                              const LimitExpertRowsAttributes& attributes, const std::string& name);

struct KeepTokensAttributes {
  int64_t first = 0;
  int64_t count = 0;
};

ValueId keep_tokens(Builder& builder, ValueId indices, const KeepTokensAttributes& attributes,
                    const std::string& name);

extern const OpSpec kLimitExpertRows;
extern const OpSpec kKeepTokens;

}  // namespace troupe
