// How a tensor in 8 bits uses its format: how many of its codes are the largest, and how many 0.
//
// Kinds
//   code_counts (codes) -> counts, i64 [kCountsOfCodes], over live rows:
//     elements   all codes
//     saturated  those of the format's largest number, of either sign (448 in f8e4m3, 57344 in
//                f8e5m2): of numbers that were too large for the scale, and of those nearest to
//                it, from 432 scales on (above 53248)
//     zeros      those of 0, of either sign: of zeros, and of numbers of at most half the smallest
//                code (2^-10 scales in f8e4m3, 2^-17 in f8e5m2)
// `codes` is f8e4m3 or f8e5m2 of any shape, as quantize gives them in rows; it may be ragged. NaN
// is an element and neither of the others. There is no derivative.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

inline constexpr int kCountsOfCodes = 3;

ValueId code_counts(Builder& builder, ValueId codes, const std::string& name);

extern const OpSpec kCodeCounts;

}  // namespace troupe
