// The part of a parameter that a rank holds: geometry, without the layout that decides it
// (parameter_layout.h) and the state that stores it (model_state.h).
//
// Pure functions and plain values; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/shape.h"
#include "program/shard.h"

namespace troupe {

// The part of a parameter that one rank holds: in each dimension the indices of its ranges, one
// range after the other.
struct ParameterSlice {
  std::vector<std::vector<IndexRange>> ranges;  // by dimension
  // The first index of dimension 0, counted in the slice, from which on other ranks of tp hold the
  // same; nothing where none do.
  std::optional<int64_t> first_shared = {};

  int64_t extent(int dimension) const;
  Shape shape() const;
  int64_t elements() const;
};

// A piece of a slice that is one stretch of the rank's memory and a box of the whole tensor.
struct SlicePiece {
  std::array<int64_t, Shape::kMaxRank> offset{};  // of the box in the whole tensor
  Shape shape;                                    // of the box
  int64_t first = 0;                              // its first element in the slice
};

// The slice as few pieces, in the order of the rank's memory.
std::vector<SlicePiece> pieces_of(const ParameterSlice& slice);

// What the shard has of the slice, as few pieces. `first` counts from the shard's first element.
std::vector<SlicePiece> pieces_of(const ParameterSlice& slice, const IndexRange& shard);

// A stretch of a slice that is one stretch of the whole tensor, too, in row-major order.
struct SliceRun {
  int64_t whole = 0;  // its first element in the whole tensor
  int64_t own = 0;    // and in the slice
  int64_t elements = 0;
};

// The slice of a tensor of shape `whole` as few such stretches, ascending in both orders.
std::vector<SliceRun> runs_of(const ParameterSlice& slice, const Shape& whole);

// What lies in elements `part` of the slice; `own` counts in the slice, as before.
std::vector<SliceRun> runs_within(std::vector<SliceRun> runs, const IndexRange& part);

}  // namespace troupe
