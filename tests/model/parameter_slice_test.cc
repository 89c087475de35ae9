// The stretches and boxes that make up the part of a parameter that a rank holds, against a count
// element by element: of slices with one range, several and none in each of up to three dimensions,
// and of every shard of them. How few they are is written out for some.
#include "model/parameter_slice.h"

#include <array>
#include <gtest/gtest.h>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "model/window_layers.h"

namespace troupe {
namespace {

using IndexRanges = std::vector<IndexRange>;

// The numbers of a slice's elements in the whole tensor, row by row.
std::vector<int64_t> elements_of(const ParameterSlice& slice, const Shape& whole) {
  std::vector<int64_t> numbers = {0};
  for (int dimension = 0; dimension < whole.rank(); ++dimension) {
    std::vector<int64_t> longer;
    for (const int64_t number : numbers) {
      for (const IndexRange& range : slice.ranges[static_cast<size_t>(dimension)]) {
        for (int64_t i = range.begin; i < range.end; ++i) {
          longer.push_back(number * whole[dimension] + i);
        }
      }
    }
    numbers = std::move(longer);
  }
  return numbers;
}

std::vector<int64_t> elements_of(const std::vector<SliceRun>& runs, int64_t first) {
  std::vector<int64_t> numbers;
  for (const SliceRun& run : runs) {
    EXPECT_GT(run.elements, 0);
    EXPECT_EQ(run.own, first + static_cast<int64_t>(numbers.size()));
    for (int64_t i = 0; i < run.elements; ++i) numbers.push_back(run.whole + i);
  }
  return numbers;
}

std::vector<int64_t> elements_of(const std::vector<SlicePiece>& pieces, const Shape& whole) {
  std::vector<int64_t> numbers;
  for (const SlicePiece& piece : pieces) {
    EXPECT_EQ(piece.first, static_cast<int64_t>(numbers.size()));
    EXPECT_GT(piece.shape.elements(), 0);
    ParameterSlice box;
    for (int i = 0; i < whole.rank(); ++i) {
      const int64_t begin = piece.offset[static_cast<size_t>(i)];
      box.ranges.push_back({{begin, begin + piece.shape[i]}});
    }
    const std::vector<int64_t> own = elements_of(box, whole);
    numbers.insert(numbers.end(), own.begin(), own.end());
  }
  return numbers;
}

// Of dimensions of 5, 4 and 3.
std::vector<ParameterSlice> slices(int rank) {
  const std::vector<std::vector<IndexRanges>> choices = {
      {{{0, 5}}, {{1, 3}}, {{0, 2}, {3, 5}}, {{2, 2}}},
      {{{0, 4}}, {{2, 4}}, {{0, 1}, {2, 3}, {3, 4}}},
      {{{0, 3}}, {{1, 2}}, {{0, 1}, {2, 3}}}};
  std::vector<ParameterSlice> all(1);
  for (size_t dimension = 0; dimension < static_cast<size_t>(rank); ++dimension) {
    std::vector<ParameterSlice> longer;
    for (const ParameterSlice& each : all) {
      for (const IndexRanges& ranges : choices[dimension]) {
        longer.push_back(each);
        longer.back().ranges.push_back(ranges);
      }
    }
    all = std::move(longer);
  }
  return all;
}

TEST(ParameterSlices, HaveTheirElementsInEveryShard) {
  for (int rank = 1; rank <= 3; ++rank) {
    const std::array<int64_t, 3> extents = {5, 4, 3};
    const Shape whole(std::span<const int64_t>(extents.data(), static_cast<size_t>(rank)));
    for (const ParameterSlice& slice : slices(rank)) {
      const std::vector<int64_t> expected = elements_of(slice, whole);
      const auto count = static_cast<int64_t>(expected.size());
      EXPECT_EQ(slice.elements(), count);
      EXPECT_EQ(slice.shape().elements(), count);
      EXPECT_EQ(elements_of(pieces_of(slice), whole), expected);
      const std::vector<SliceRun> runs = runs_of(slice, whole);
      EXPECT_EQ(elements_of(runs, 0), expected);
      for (int64_t begin = 0; begin <= count; ++begin) {
        for (int64_t end = begin; end <= count; ++end) {
          const std::vector<int64_t> part(expected.begin() + begin, expected.begin() + end);
          EXPECT_EQ(elements_of(pieces_of(slice, {begin, end}), whole), part);
          EXPECT_EQ(elements_of(runs_within(runs, {begin, end}), begin), part);
        }
      }
    }
  }
}

// "offset shape" of each.
std::string text_of(const std::vector<SlicePiece>& pieces) {
  std::string text;
  for (const SlicePiece& piece : pieces) {
    text += text.empty() ? "" : ", ";
    for (int i = 0; i < piece.shape.rank(); ++i) {
      text += std::to_string(piece.offset[static_cast<size_t>(i)]) + " ";
    }
    text += piece.shape.to_string();
  }
  return text;
}

TEST(ParameterSlices, AreFewPieces) {
  const ParameterSlice whole{{{{0, 4}}, {{0, 3}}, {{0, 2}}}};
  EXPECT_EQ(text_of(pieces_of(whole)), "0 0 0 [4, 3, 2]");
  EXPECT_EQ(text_of(pieces_of(whole, {6, 18})), "1 0 0 [2, 3, 2]");
  EXPECT_EQ(text_of(pieces_of(whole, {3, 17})),
            "0 1 1 [1, 1, 1], 0 2 0 [1, 1, 2], 1 0 0 [1, 3, 2], 2 0 0 [1, 2, 2], 2 2 0 [1, 1, 1]");
  EXPECT_EQ(text_of(pieces_of(whole, {7, 10})), "1 0 1 [1, 1, 1], 1 1 0 [1, 1, 2]");
  EXPECT_EQ(text_of(pieces_of(whole, {8, 9})), "1 1 0 [1, 1, 1]");
  const ParameterSlice halves{{{{0, 4}}, {{0, 1}, {2, 3}}, {{0, 2}}}};
  EXPECT_EQ(text_of(pieces_of(halves)),
            "0 0 0 [1, 1, 2], 0 2 0 [1, 1, 2], 1 0 0 [1, 1, 2], 1 2 0 [1, 1, 2], 2 0 0 [1, 1, 2], "
            "2 2 0 [1, 1, 2], 3 0 0 [1, 1, 2], 3 2 0 [1, 1, 2]");
  const ParameterSlice rows{{{{0, 1}, {2, 4}}, {{0, 3}}, {{0, 2}}}};
  EXPECT_EQ(text_of(pieces_of(rows)), "0 0 0 [1, 3, 2], 2 0 0 [2, 3, 2]");
  EXPECT_EQ(text_of(pieces_of(rows, {4, 8})), "0 2 0 [1, 1, 2], 2 0 0 [1, 1, 2]");
}

// "first in the whole +elements" of each.
std::string text_of(const std::vector<SliceRun>& runs) {
  std::string text;
  for (const SliceRun& run : runs) {
    text += (text.empty() ? "" : ", ") + std::to_string(run.whole) + " +" +
            std::to_string(run.elements);
  }
  return text;
}

TEST(ParameterSlices, AreFewRuns) {
  const Shape shape = {4, 3, 2};
  EXPECT_EQ(text_of(runs_of({{{{0, 4}}, {{0, 3}}, {{0, 2}}}}, shape)), "0 +24");
  EXPECT_EQ(text_of(runs_of({{{{1, 3}}, {{0, 3}}, {{0, 2}}}}, shape)), "6 +12");
  EXPECT_EQ(text_of(runs_of({{{{0, 1}, {2, 4}}, {{0, 3}}, {{0, 2}}}}, shape)), "0 +6, 12 +12");
  EXPECT_EQ(text_of(runs_of({{{{1, 3}}, {{1, 3}}, {{0, 2}}}}, shape)), "8 +4, 14 +4");
  EXPECT_EQ(text_of(runs_of({{{{3, 4}}, {{0, 1}, {2, 3}}, {{0, 2}}}}, shape)), "18 +2, 22 +2");
  EXPECT_EQ(text_of(runs_of({{{{3, 4}}, {{0, 3}}, {{1, 2}}}}, shape)), "19 +1, 21 +1, 23 +1");
  EXPECT_EQ(text_of(runs_of({{{{2, 2}}, {{0, 3}}, {{0, 2}}}}, shape)), "");
}

// Where all layers are of one kind there is no list, and without any there is no window.
TEST(WindowLayers, AreAListOnlyWhereLayersDiffer) {
  for (const auto& [layers, window, listed] : {std::tuple(std::vector<bool>{true, true}, 8, false),
                                               {{false, false}, 0, false},
                                               {{true, false}, 8, true},
                                               {{false, true}, 8, true}}) {
    ModelConfig config;
    config.sliding_window = 8;
    config.window_layers = {true};
    set_window_layers(layers, config);
    EXPECT_EQ(config.sliding_window, window);
    EXPECT_EQ(config.window_layers, listed ? layers : std::vector<bool>{});
  }
}

}  // namespace
}  // namespace troupe
