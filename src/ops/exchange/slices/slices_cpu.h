// Which index of a slice is which of the whole tensor, for the rules and the kernels of slices, on
// CPU and GPU. Pure functions. Private to this folder.
#pragma once

#include <cstdint>

#include "base/shape.h"
#include "ops/exchange/slices/slices.h"

namespace troupe {

// Of the cut dimension an index of a rank's slice, or of the whole tensor, from which on `count`
// indices follow each other in both.
struct SliceIndex {
  int64_t rank = 0;  // the first that holds it
  int64_t index = 0;
  int64_t count = 0;
};

// Indices of a section that each rank has.
constexpr int64_t slice_part(const SliceCut& cut, const SliceSection& section) {
  return section.size * section.copies / cut.ranks;
}

constexpr int64_t slice_extent(const SliceCut& cut) {
  int64_t extent = 0;
  for (const SliceSection& section : cut.sections) extent += slice_part(cut, section);
  return extent;
}

constexpr int64_t whole_extent(const SliceCut& cut) {
  int64_t extent = 0;
  for (const SliceSection& section : cut.sections) extent += section.size;
  return extent;
}

// The rank and index at which index `i` of the whole tensor lies.
constexpr SliceIndex index_in_slice(const SliceCut& cut, int64_t i) {
  int64_t begin = 0;
  for (const SliceSection& section : cut.sections) {
    const int64_t part = slice_part(cut, section);
    if (i < section.size) {
      return {i / part * section.copies, begin + i % part, part - i % part};
    }
    i -= section.size;
    begin += part;
  }
  return {};
}

// The index of the whole tensor that rank cut.place has at index `i` of its slice.
constexpr SliceIndex index_in_whole(const SliceCut& cut, int64_t i) {
  int64_t begin = 0;
  for (const SliceSection& section : cut.sections) {
    const int64_t part = slice_part(cut, section);
    if (i < part) return {cut.place, begin + cut.place / section.copies * part + i, part - i};
    i -= part;
    begin += section.size;
  }
  return {};
}

// Has rank cut.place index `i` of the whole tensor, and where in its slice?
struct OwnIndex {
  bool is_there = false;
  int64_t index = 0;
};
constexpr OwnIndex own_index(const SliceCut& cut, int64_t i) {
  const int64_t index = index_in_slice(cut, i).index;
  return {index_in_whole(cut, index).index == i, index};
}

// A tensor as [outer, extent, inner] with the cut dimension in the middle.
struct CutShape {
  int64_t outer = 1;
  int64_t extent = 0;
  int64_t inner = 1;

  CutShape(const Shape& shape, int dimension) : extent(shape[dimension]) {
    for (int i = 0; i < dimension; ++i) outer *= shape[i];
    for (int i = dimension + 1; i < shape.rank(); ++i) inner *= shape[i];
  }
};

}  // namespace troupe
