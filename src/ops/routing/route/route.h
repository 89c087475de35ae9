// Route: the dispatch plan of one rank. From the experts that the tokens chose it computes where
// each chosen (token, slot) pair, here called a flat slot, lies in the expert-major order of rows
// in which the experts work (semantics of Megatron Core's token permutation):
//   - rows are sorted by expert; rows of one expert keep the order of their tokens (stable);
//   - a slot whose index is -1 is dropped: it has no row.
// So a dropless batch has exactly T*k live rows, and row_slot and slot_row are each other's
// inverse.
//
// Padding. On request each expert gets filler rows after its own, so that matrix products find
// round or constant numbers of rows:
//   row_multiple A      an expert's number of rows is rounded up to a multiple of A; an expert
//                       without rows stays without;
//   padded_capacity C   every expert has exactly C rows. Slots beyond an expert's first C are
//                       dropped; which ones go is better decided before, by expert_capacity.
// A filler row is a live row that belongs to no slot: its row_slot is -1, and no slot_row names it.
// Offsets count fillers, counts do not. Operations that read rows let fillers contribute nothing:
//   - permute writes zeros into them, in forward and as the derivative of combine, so the products
//     of a grouped_linear, and the terms that they add to its weight gradients, are zero;
//   - an activation with router weights gives them the weight 0 and no weight's gradient;
//   - combine, in forward and as the derivative of permute, looks rows up by slot_row and never
//     meets them.
// A dropped slot has no row, so its router weight gets the gradient 0 exactly.
//
// All results are integers that stay on the device; the host never learns a count. There is no
// derivative. The kernel is a counting sort: parallel over fixed chunks of slots, and the same
// bits for any number of threads.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct RouteAttributes {
  int32_t experts = 0;          // E: number of experts that the indices name
  int32_t row_multiple = 1;     // A; 1: rows are not rounded up
  int32_t padded_capacity = 0;  // C; 0: rows are not padded to a capacity. Not with a row_multiple
  int64_t most_slots = 0;       // L: how many slots name an expert at most; 0: all T*k
  int64_t expected_slots = 0;   // how many are expected to; 0: all T*k
};

// The bound R of the rows of a plan for `slots` = T*k slots, of which L at most name an expert,
// with N = min(E, L) experts at most that have rows: L + N*(A-1) rounded down to a multiple of A,
// which is reached when each of them has one row more than a multiple; or E*C.
int64_t route_row_bound(int64_t slots, const RouteAttributes& attributes);

// The plan, as values of the program. T tokens, k slots per token, R the bound of the rows.
struct Routing {
  ValueId counts;    // i32 [E]: rows of each expert that belong to a slot
  ValueId offsets;   // i32 [E+1]: first row of each expert; the last element counts all live rows
  ValueId row_slot;  // i32 [R], ragged with RowCount{offsets, E}: flat slot t*k + s of a row, -1 of
                     // a filler row
  ValueId slot_row;  // i32 [T, k]: row of a slot, -1 when the slot is dropped
  int32_t top_k = 0;
  int32_t experts = 0;
};

// `indices`: i32 [T, k], each in [0, E) or -1. T*k and R must be below 2^31. So that nothing makes
// the kernel write elsewhere, a number outside [0, E) is treated as -1, and rows beyond R are cut
// off; that there are none is the caller's care (ops/experts/expert_rows). Results are named
// name.counts, name.offsets, name.row_slot and name.slot_row.
Routing route(Builder& builder, ValueId indices, const RouteAttributes& attributes,
              const std::string& name);

// Inputs: indices. Outputs: counts, offsets, row_slot, slot_row.
extern const OpSpec kRoute;

}  // namespace troupe
