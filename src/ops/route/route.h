// Route: the dispatch plan of one rank. From the experts that the tokens chose it computes where
// each chosen (token, slot) pair, here called a flat slot, lies in the expert-major order of rows
// in which the experts work (semantics of Megatron Core's token permutation):
//   - rows are sorted by expert; rows of one expert keep the order of their tokens (stable);
//   - a slot whose index is -1 is dropped: it has no row.
// So a dropless batch has exactly T*k live rows, and row_slot and slot_row are each other's
// inverse.
//
// All results are integers that stay on the device; the host never learns a count. There is no
// derivative. The kernel is a counting sort: parallel over fixed chunks of tokens, and the same
// bits for any number of threads.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct RouteAttributes {
  int32_t experts = 0;  // E: number of experts that the indices name
};

// The plan, as values of the program. T tokens, k slots per token, R = T*k.
struct Routing {
  ValueId counts;    // i32 [E]: live rows of each expert
  ValueId offsets;   // i32 [E+1]: first row of each expert; the last element counts all live rows
  ValueId row_slot;  // i32 [R], ragged with RowCount{offsets, E}: flat slot t*k + s of a row
  ValueId slot_row;  // i32 [T, k]: row of a slot, -1 when the slot is dropped
  int32_t top_k = 0;
  int32_t experts = 0;
};

// `indices`: i32 [T, k], each in [0, E) or -1. T*k must be below 2^31. (A number outside that range
// is treated as -1, so that a broken router cannot make the kernel write elsewhere.)
// Results are named name.counts, name.offsets, name.row_slot and name.slot_row.
Routing route(Builder& builder, ValueId indices, const RouteAttributes& attributes,
              const std::string& name);

// Inputs: indices. Outputs: counts, offsets, row_slot, slot_row.
extern const OpSpec kRoute;

}  // namespace troupe
