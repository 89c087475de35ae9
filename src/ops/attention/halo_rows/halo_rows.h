// The rows just before the chunks of sequences that a rank has, which other ranks have: what a
// convolution over time needs of them.
//
// n ranks have two chunks of L rows of each of B sequences (program/row_origin.h); k rows before a
// chunk are needed, and of each chunk the last m = min(L, k) sent. Rows only move:
//
//   step     x                                      y
//   ends     [2 B L, C], this rank's chunks         [2 B m, C], the last m rows of each
//   before   [n 2 B m, C], these of all ranks       [2 B k, C], the k rows before each of this
//                                                   rank's chunks, zeros before the sequence
//
// and of both the derivative, from y to x: zeros where nothing came from, and the sum, rounded
// once, of a row that is before both chunks (where L < k). Over ranks the sum of these is the
// gradient, as all_gather's derivative makes it.
//
// Kinds
//   halo_rows (x) -> y    any float dtype, not ragged
#pragma once

#include <string>

#include "ops/attention/halo_rows/halo_sources.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

ValueId halo_rows(Builder& builder, ValueId x, const HaloRowsAttributes& attributes,
                  const std::string& name);

extern const OpSpec kHaloRows;

}  // namespace troupe
