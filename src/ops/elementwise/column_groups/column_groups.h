// Column groups: projections whose rows hold, for each group of heads, several things side by side,
// as Hugging Face's Qwen3-Next has queries with their gates; taken apart into two matrices that
// attention and convolutions read, and put together again. Each is the other's derivative.
//
// A row of x has `groups` groups of w_0 + ... + w_{n-1} columns (n sections), then `tail` columns.
// Of the two matrices the first has the first `first` sections and then the tail, the second the
// other sections; each section's columns of all groups lie one after the other:
//   x  = (s_0 s_1 ... s_{n-1}) of group 0, (s_0 ...) of group 1, ..., tail
//   a  = s_0 of all groups, s_1 of all groups, ..., s_{first-1} of all groups, tail
//   b  = s_first of all groups, ..., s_{n-1} of all groups
//
// Kinds
//   split_column_groups (x [T, w])   -> a, b
//   join_column_groups  (a, b)       -> x
// Any float dtype, not ragged; elements only move. Both results of a split are used where a
// gradient is needed.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct ColumnGroupsAttributes {
  int32_t groups = 1;
  std::array<int32_t, 4> widths = {};  // of the sections in a group; 0: there are no more
  int32_t first = 1;                   // sections of the first matrix; the second has one at least
  int32_t tail = 0;

  constexpr int32_t group_width() const { return widths[0] + widths[1] + widths[2] + widths[3]; }
  constexpr int64_t columns() const { return int64_t{groups} * group_width() + tail; }
  constexpr int64_t second_columns() const {
    int64_t of_group = 0;
    for (size_t i = static_cast<size_t>(first); i < widths.size(); ++i) of_group += widths[i];
    return of_group * groups;
  }
  constexpr int64_t first_columns() const { return columns() - second_columns(); }

  // Where a column of x goes: a column of the first matrix, or, from first_columns() on, one of the
  // second after it.
  constexpr int64_t destination(int64_t column) const {
    const int64_t grouped = columns() - tail;
    if (column >= grouped) return first_columns() - tail + (column - grouped);
    const int64_t group = column / group_width();
    int64_t within = column % group_width();
    int64_t begin = 0;
    for (int32_t i = 0; i < static_cast<int32_t>(widths.size()); ++i) {
      const int32_t width = widths[static_cast<size_t>(i)];
      if (i == first) begin += tail;
      if (within < width) return begin + group * width + within;
      within -= width;
      begin += int64_t{groups} * width;
    }
    return -1;
  }
};

struct ColumnGroupsResult {
  ValueId first;
  ValueId second;
};

// Results are named `name` and name.second.
ColumnGroupsResult split_column_groups(Builder& builder, ValueId x,
                                       const ColumnGroupsAttributes& attributes,
                                       const std::string& name);

extern const OpSpec kSplitColumnGroups;
extern const OpSpec kJoinColumnGroups;

}  // namespace troupe
