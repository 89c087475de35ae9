// Split rows: consecutive rows of a tensor as tensors of their own, each of the same number of rows
// except the last, which has what is left. Join rows puts them together again; each is the other's
// derivative.
//
// Kinds
//   split_rows (x [T, ...])                     -> pieces [n, ...], ..., the last [T - (N - 1) n,
//   ...] join_rows  (pieces [n, ...], ..., [m, ...]) -> x [(N - 1) n + m, ...]     with 0 < m <= n
// Of any dtype, not ragged. All pieces are used where a gradient is needed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct SplitRowsAttributes {
  int64_t rows = 0;  // n
};

// Pieces are named name.0, name.1, ...
std::vector<ValueId> split_rows(Builder& builder, ValueId x, const SplitRowsAttributes& attributes,
                                const std::string& name);

ValueId join_rows(Builder& builder, std::span<const ValueId> pieces, const std::string& name);

extern const OpSpec kSplitRows;
extern const OpSpec kJoinRows;

}  // namespace troupe
