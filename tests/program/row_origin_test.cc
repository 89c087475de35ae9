// Where rows lie in the whole: chunks cover each sequence once, and runs agree with single rows.
#include "program/row_origin.h"

#include <gtest/gtest.h>
#include <vector>

namespace troupe {
namespace {

TEST(RowOrigin, ChunksOfAllRanksCoverASequenceOnce) {
  for (const int32_t ranks : {1, 2, 3, 5}) {
    const int64_t rows = 6;
    std::vector<int> seen(static_cast<size_t>(rows * ranks));
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const SequenceChunks chunks{.ranks = ranks, .rank = rank};
      for (int64_t row = 0; row < rows; ++row) {
        ++seen.at(static_cast<size_t>(chunks.position(row, rows)));
      }
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1)) << ranks << " ranks";
  }
}

// Two ranks of eight tokens.
TEST(RowOrigin, EachRankHasAChunkFromEitherEnd) {
  const auto positions = [](int32_t rank) {
    std::vector<int64_t> all;
    for (int64_t row = 0; row < 4; ++row) {
      all.push_back(SequenceChunks{.ranks = 2, .rank = rank}.position(row, 4));
    }
    return all;
  };
  EXPECT_EQ(positions(0), (std::vector<int64_t>{0, 1, 6, 7}));
  EXPECT_EQ(positions(1), (std::vector<int64_t>{2, 3, 4, 5}));
}

TEST(RowOrigin, RunsAreThoseOfSingleElements) {
  constexpr int64_t kWidth = 3;
  constexpr int64_t kRows = 7;
  const RowOrigin origins[] = {{},
                               {.first_row = 5},
                               {.first_row = 0, .sequence = 4, .chunks = {.ranks = 2, .rank = 0}},
                               {.first_row = 3, .sequence = 4, .chunks = {.ranks = 2, .rank = 1}},
                               {.first_row = 2, .sequence = 2, .chunks = {.ranks = 3, .rank = 1}}};
  for (const RowOrigin& origin : origins) {
    for (int64_t begin = 0; begin < kRows * kWidth; ++begin) {
      for (int64_t end = begin; end <= kRows * kWidth; ++end) {
        int64_t next = begin;
        origin.for_each_run(kWidth, begin, end, [&](int64_t first, int64_t last, int64_t whole) {
          ASSERT_EQ(first, next);
          ASSERT_LT(first, last);
          for (int64_t i = first; i < last; ++i) {
            ASSERT_EQ(whole + i - first, origin.whole_row(i / kWidth) * kWidth + i % kWidth)
                << "element " << i << " of" << text_of(origin);
          }
          next = last;
        });
        ASSERT_EQ(next, end);
      }
    }
  }
}

}  // namespace
}  // namespace troupe
