// Codes in rows, put in the order in which products read them that sum over rows
// (ops/precision/scale_blocks.h): as quantize gives both, where the rows came from other ranks.
//
// Kind
//   transpose_codes (codes) -> transposed codes, of the same dtype
// Codes are f8, [R, C] or [E, N, K], not ragged. Nothing is rounded, and scales are those of the
// rows: one for a matrix, or for blocks of 128 rows. There is no derivative.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

ValueId transpose_codes(Builder& builder, ValueId codes, const std::string& name);

extern const OpSpec kTransposeCodes;

}  // namespace troupe
