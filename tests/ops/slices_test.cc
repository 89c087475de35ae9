// Slices that are cut out of a whole tensor by plain loops, against what join_slices and take_slice
// make of them.
#include "ops/exchange/slices/slices.h"

#include <gtest/gtest.h>
#include <numeric>
#include <vector>

#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

// Of a whole [batch, rows, columns], whose rows (dimension 1) or columns (dimension 2) are cut.
struct SlicedCase {
  int64_t batch, rows, columns;
  SliceCut cut;
};

// The indices of the cut dimension that a rank has, from the description in slices.h.
std::vector<int64_t> indices_of(const SliceCut& cut, int64_t rank) {
  std::vector<int64_t> indices;
  int64_t begin = 0;
  for (const SliceSection& section : cut.sections) {
    const int64_t parts = cut.ranks / section.copies;
    const int64_t part = section.size / parts;
    for (int64_t i = 0; i < part; ++i) {
      indices.push_back(begin + rank / section.copies * part + i);
    }
    begin += section.size;
  }
  return indices;
}

Numbers plain_slice(const SlicedCase& c, const Numbers& whole, int64_t rank) {
  const std::vector<int64_t> own = indices_of(c.cut, rank);
  Numbers slice;
  const bool cuts_rows = c.cut.dimension == 1;
  const auto at = [&](int64_t b, int64_t i, int64_t j) {
    return whole[static_cast<size_t>((b * c.rows + i) * c.columns + j)];
  };
  for (int64_t b = 0; b < c.batch; ++b) {
    if (cuts_rows) {
      for (const int64_t i : own) {
        for (int64_t j = 0; j < c.columns; ++j) slice.push_back(at(b, i, j));
      }
      continue;
    }
    for (int64_t i = 0; i < c.rows; ++i) {
      for (const int64_t j : own) slice.push_back(at(b, i, j));
    }
  }
  return slice;
}

TEST(Slices, JoinAndTakeAreThoseOfPlainLoops) {
  const std::vector<SlicedCase> cases = {
      {1, 16, 5, {.sections = {{{8}, {4}, {4}}}, .dimension = 1, .ranks = 4}},
      {3, 24, 7, {.sections = {{{16}, {4, 2}, {4, 2}}}, .dimension = 1, .ranks = 4}},
      {2, 9, 12, {.sections = {{{12}}}, .dimension = 2, .ranks = 3}},
      {150, 6, 33, {.sections = {{{33}}}, .dimension = 2, .ranks = 3}}};
  for (SlicedCase c : cases) {
    Numbers whole(static_cast<size_t>(c.batch * c.rows * c.columns));
    std::iota(whole.begin(), whole.end(), 0.0);
    Numbers slices;
    const auto own = static_cast<int64_t>(indices_of(c.cut, 0).size());
    const bool cuts_rows = c.cut.dimension == 1;
    for (int32_t rank = 0; rank < c.cut.ranks; ++rank) {
      const Numbers slice = plain_slice(c, whole, rank);
      slices.insert(slices.end(), slice.begin(), slice.end());
      c.cut.place = rank;
      const auto taken = run_sample([&](SampleBuilder& sample) {
        const ValueId x =
            sample.values("whole", {c.batch, c.rows, c.columns}, whole, {.differentiable = false});
        sample.result_without_gradient(take_slice(sample.builder(), x, c.cut, "slice"));
      });
      EXPECT_EQ(taken[0], slice) << rank;
    }
    const Shape all = {c.cut.ranks * c.batch, cuts_rows ? own : c.rows,
                       cuts_rows ? c.columns : own};
    const auto joined = run_sample([&](SampleBuilder& sample) {
      const ValueId x = sample.values("x", all, slices, {.differentiable = false});
      sample.result_without_gradient(join_slices(sample.builder(), x, c.cut, "whole"));
    });
    EXPECT_EQ(joined[0], whole);
  }
}

TEST(SlicesDeathTest, JoinRefusesSlicesOfAnotherExtent) {
  Program program(std::make_shared<const StateTable>());
  Builder builder(program);
  const SliceCut cut{.sections = {{{8}}}, .dimension = 2, .ranks = 2};
  const ValueId wider = builder.input("wider", DType::f32, {2, 3, 5});
  EXPECT_DEATH(join_slices(builder, wider, cut, "whole"), "not the slices of the cut: wider");
  const ValueId fewer = builder.input("fewer", DType::f32, {3, 3, 4});
  EXPECT_DEATH(join_slices(builder, fewer, cut, "whole"), "not as many slices: fewer");
}

}  // namespace
}  // namespace troupe::testing
