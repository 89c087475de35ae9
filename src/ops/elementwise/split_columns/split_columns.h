// Split columns: the first columns of a matrix and the other ones, as two matrices. Join columns
// puts them together again; each is the other's derivative.
//
// Kinds
//   split_columns (x [T, w])           -> a [T, c], b [T, w - c]     with 0 < c < w
//   join_columns  (a [T, c], b [T, w - c]) -> x [T, w]
// Any float dtype, not ragged. Both results of a split are used where a gradient is needed.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct SplitColumnsAttributes {
  int64_t columns = 0;  // c
};

struct SplitColumnsResult {
  ValueId first;
  ValueId rest;
};

// Results are named `name` and name.rest.
SplitColumnsResult split_columns(Builder& builder, ValueId x,
                                 const SplitColumnsAttributes& attributes, const std::string& name);

ValueId join_columns(Builder& builder, ValueId first, ValueId rest, const std::string& name);

extern const OpSpec kSplitColumns;
extern const OpSpec kJoinColumns;

}  // namespace troupe
