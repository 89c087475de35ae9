// Copies of hot experts: which ranks get a copy of which expert, and which of an expert's rows go
// to its copies. P ranks share E experts, L = E/P successive ones each, and have N places for
// copies. Slots number both, rank after rank: rank r has the slots from r (L + N) on, first those
// of its own experts, then those of its copies.
//
// Kinds
//   place_clones (loads i32 [E]) -> experts i32 [P N], slot_loads i32 [P (L + N)]
//       loads[e] counts the rows of expert e of all ranks. experts[r N + i] is the expert of which
//       rank r has a copy in its i-th place, -1 where the place is empty; slot_loads says how the
//       rows are divided. With mean = ceil(sum of loads / P) and least = max(1, mean / 32), at
//       first all rows are at the expert's own rank. Then, again and again:
//         s = the rank with most rows
//         d = of the ranks with an empty place the one with fewest rows
//         e = of the own experts of s the one with most rows there
//         x = the smallest of: rows of s - mean, mean - rows of d, rows of e at s
//       If there is no d, or x < least, that is all. Otherwise x rows of e go from s to a copy in
//       the first empty place of d. Of equals the lowest number is taken.
//       So no rank that receives rows gets more than the mean, and none that gives some gets
//       fewer: the largest load never rises, no rank both gives and receives, and none gets two
//       copies of one expert, since each x uses up what s has too much, what d has too little, or
//       the rows of e at s.
//   spread_over_clones (indices i32 [T, k], running i32 [E], experts, slot_loads)
//                                                                    -> slots i32 [T, k]
//       The slot that serves each choice; -1 for one outside [0, E). running[e] counts the rows of
//       expert e of the ranks up to this one (prefix_sum). The rows of an expert are numbered by
//       rank, then in the order of the choices there: the first slot_loads of them go to its own
//       rank, the next to its copies, in the order of slots.
// Integers that stay on the device; there is no derivative. Sums of loads stay below 2^31.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct ClonePlacementAttributes {
  int32_t parts = 1;   // P
  int32_t clones = 1;  // N
};

struct ClonePlacement {
  ValueId experts;
  ValueId slot_loads;
  ClonePlacementAttributes attributes = {};
};

// Results are named name.experts and name.slot_loads.
ClonePlacement place_clones(Builder& builder, ValueId loads,
                            const ClonePlacementAttributes& attributes, const std::string& name);

ValueId spread_over_clones(Builder& builder, ValueId indices, ValueId running,
                           const ClonePlacement& placement, const std::string& name);

extern const OpSpec kPlaceClones;
extern const OpSpec kSpreadOverClones;

// The rows of each rank as place_clones divides them, also with no places (N = 0): for plans and
// reports. Allocates; any thread.
std::vector<int32_t> rows_with_clones(std::span<const int32_t> loads,
                                      const ClonePlacementAttributes& attributes);

// The least number of rows that is worth a copy.
inline constexpr int32_t kLeastShareOfMean = 32;

}  // namespace troupe
