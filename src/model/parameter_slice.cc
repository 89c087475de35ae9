#include "model/parameter_slice.h"

#include <algorithm>

#include "base/error.h"

namespace troupe {

int64_t ParameterSlice::extent(int dimension) const {
  int64_t extent = 0;
  for (const IndexRange& range : ranges[static_cast<size_t>(dimension)]) {
    extent += range.end - range.begin;
  }
  return extent;
}

Shape ParameterSlice::shape() const {
  std::vector<int64_t> extents;
  for (size_t i = 0; i < ranges.size(); ++i) extents.push_back(extent(static_cast<int>(i)));
  return Shape(extents);
}

int64_t ParameterSlice::elements() const {
  int64_t elements = 1;
  for (size_t i = 0; i < ranges.size(); ++i) elements *= extent(static_cast<int>(i));
  return elements;
}

std::vector<SlicePiece> pieces_of(const ParameterSlice& slice) {
  // A piece is contiguous if only its first dimensions are cut to one index each: everything before
  // the last dimension of several ranges is.
  const size_t rank = slice.ranges.size();
  size_t single = 0;
  for (size_t i = 0; i < rank; ++i) {
    if (slice.ranges[i].size() > 1) single = i;
  }
  std::vector<SlicePiece> pieces;
  std::vector<int64_t> extents(rank);
  SlicePiece piece;
  int64_t first = 0;
  const auto cut = [&](const auto& self, size_t dimension) -> void {
    if (dimension == rank) {
      piece.shape = Shape(extents);
      piece.first = first;
      first += piece.shape.elements();
      if (piece.shape.elements() > 0) pieces.push_back(piece);
      return;
    }
    TROUPE_CHECK(dimension < Shape::kMaxRank, "a slice of more dimensions than there are");
    for (const IndexRange& range : slice.ranges[dimension]) {
      const int64_t step = dimension < single ? 1 : range.end - range.begin;
      for (int64_t begin = range.begin; begin < range.end; begin += step) {
        piece.offset[dimension] = begin;
        extents[dimension] = step;
        self(self, dimension + 1);
      }
    }
  };
  cut(cut, 0);
  return pieces;
}

namespace {

// Appends the boxes that make up elements [begin, end) of a box, in order: whole indices of the
// first dimension, and before and after them parts of one.
void cut_box(const SlicePiece& box, size_t dimension, int64_t begin, int64_t end,
             std::vector<SlicePiece>& pieces) {
  if (begin >= end) return;
  const auto rank = static_cast<size_t>(box.shape.rank());
  int64_t inner = 1;
  for (size_t i = dimension + 1; i < rank; ++i) inner *= box.shape[static_cast<int>(i)];
  // Of the dimension the indices [first, last), and of them elements [from, to).
  const auto add = [&](int64_t first, int64_t last, int64_t from, int64_t to) {
    if (first >= last || from >= to) return;
    std::vector<int64_t> extents;
    for (size_t i = 0; i < rank; ++i) extents.push_back(box.shape[static_cast<int>(i)]);
    extents[dimension] = last - first;
    SlicePiece piece = box;
    piece.offset[dimension] += first;
    piece.shape = Shape(extents);
    piece.first += first * inner;
    if (to - from == (last - first) * inner) {
      pieces.push_back(piece);
    } else {
      cut_box(piece, dimension + 1, from, to, pieces);
    }
  };
  const int64_t first_whole = (begin + inner - 1) / inner;
  const int64_t last_whole = end / inner;
  if (first_whole > last_whole) {  // all within one index
    add(last_whole, first_whole, begin - last_whole * inner, end - last_whole * inner);
    return;
  }
  add(first_whole - 1, first_whole, begin - (first_whole - 1) * inner, inner);
  add(first_whole, last_whole, 0, (last_whole - first_whole) * inner);
  add(last_whole, last_whole + 1, 0, end - last_whole * inner);
}

}  // namespace

std::vector<SlicePiece> pieces_of(const ParameterSlice& slice, const IndexRange& shard) {
  std::vector<SlicePiece> pieces;
  for (const SlicePiece& piece : pieces_of(slice)) {
    const int64_t end = piece.first + piece.shape.elements();
    cut_box(piece, 0, std::max(shard.begin, piece.first) - piece.first,
            std::min(shard.end, end) - piece.first, pieces);
  }
  for (SlicePiece& piece : pieces) piece.first -= shard.begin;
  return pieces;
}

std::vector<SliceRun> runs_of(const ParameterSlice& slice, const Shape& whole) {
  // The last dimensions that are held in full belong to every run; the one before them ends it.
  const auto rank = static_cast<size_t>(whole.rank());
  size_t last = rank;
  int64_t inner = 1;
  while (last > 0) {
    --last;
    const auto& ranges = slice.ranges[last];
    const int64_t extent = whole[static_cast<int>(last)];
    if (last == 0 || ranges.size() != 1 || !(ranges[0] == IndexRange{0, extent})) break;
    inner *= extent;
  }
  std::vector<SliceRun> runs;
  int64_t own = 0;
  const auto walk = [&](const auto& self, size_t dimension, int64_t before) -> void {
    TROUPE_CHECK(dimension < Shape::kMaxRank, "a slice of more dimensions than there are");
    const int64_t base = before * whole[static_cast<int>(dimension)];
    for (const IndexRange& range : slice.ranges[dimension]) {
      if (dimension == last) {
        const int64_t elements = (range.end - range.begin) * inner;
        if (elements > 0) runs.push_back({(base + range.begin) * inner, own, elements});
        own += elements;
        continue;
      }
      for (int64_t i = range.begin; i < range.end; ++i) self(self, dimension + 1, base + i);
    }
  };
  walk(walk, 0, 0);
  return runs;
}

std::vector<SliceRun> runs_within(std::vector<SliceRun> runs, const IndexRange& part) {
  for (SliceRun& run : runs) {
    const int64_t begin = std::max(run.own, part.begin);
    const int64_t end = std::min(run.own + run.elements, part.end);
    run = {run.whole + begin - run.own, begin, end - begin};
  }
  std::erase_if(runs, [](const SliceRun& run) { return run.elements <= 0; });
  return runs;
}

}  // namespace troupe
