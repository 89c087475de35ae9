// The loads of experts over time, in stretches: nothing is lost or counted twice when neighbours
// become one, and the memory stays bounded.
#include "report/load_history.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <vector>

namespace troupe {
namespace {

using Rows = std::vector<LoadHistory::LayerRows>;

// Two layers of two experts, of which each step has other rows.
Rows rows_of_step(int64_t step) {
  const auto number = static_cast<double>(step);
  return {{.layer = 1, .rows = {number, 1}}, {.layer = 3, .rows = {2 * number, 3}}};
}

TEST(LoadHistory, EachStepIsInOneStretch) {
  LoadHistory history;
  EXPECT_TRUE(history.empty());
  int64_t per_stretch = 1;
  for (int64_t count = 1; count <= 700; ++count) {
    ASSERT_TRUE(history.add(10 * count, rows_of_step(10 * count)));
    if (count > 160 * per_stretch) per_stretch *= 2;
    const auto stretches = static_cast<size_t>((count + per_stretch - 1) / per_stretch);
    ASSERT_EQ(history.stretches().size(), stretches) << "after " << count << " steps";
    ASSERT_EQ(history.first_steps().size(), stretches);
  }
  ASSERT_EQ(per_stretch, 8);
  for (size_t i = 0; i < history.stretches().size(); ++i) {
    const auto first = static_cast<int64_t>(i) * 8 + 1;
    const int64_t last = std::min<int64_t>(first + 7, 700);
    EXPECT_EQ(history.first_steps()[i], 10 * first);
    const double sum = 10.0 * static_cast<double>((first + last) * (last - first + 1) / 2);
    const auto steps = static_cast<double>(last - first + 1);
    const Rows& layers = history.stretches()[i];
    EXPECT_EQ(layers[0].layer, 1);
    EXPECT_EQ(layers[0].rows, (std::vector<double>{sum, steps}));
    EXPECT_EQ(layers[1].layer, 3);
    EXPECT_EQ(layers[1].rows, (std::vector<double>{2 * sum, 3 * steps}));
  }
}

// Of many experts there are fewer stretches, here 17: the last of an odd number has no neighbour
// and is filled first.
TEST(LoadHistory, TheLastOfAnOddNumberIsFilledFirst) {
  constexpr size_t kExperts = 300'000 / 17;
  LoadHistory history;
  const Rows layers = {{.layer = 0, .rows = std::vector<double>(kExperts, 1)}};
  for (int64_t step = 1; step <= 17; ++step) history.add(step, layers);
  EXPECT_EQ(history.stretches().size(), 17U);
  history.add(18, layers);
  const std::vector<int64_t> firsts = {1, 3, 5, 7, 9, 11, 13, 15, 17};
  EXPECT_EQ(history.first_steps(), firsts);
  for (const Rows& stretch : history.stretches()) {
    EXPECT_EQ(stretch.front().rows, std::vector<double>(kExperts, 2));
  }
  history.add(19, layers);
  EXPECT_EQ(history.first_steps().back(), 19);
}

TEST(LoadHistory, HasAtLeastSixteenStretches) {
  LoadHistory history;
  const Rows layers = {{.layer = 0, .rows = std::vector<double>(100'000, 1)}};
  for (int64_t step = 1; step <= 16; ++step) history.add(step, layers);
  EXPECT_EQ(history.stretches().size(), 16U);
  history.add(17, layers);
  EXPECT_EQ(history.stretches().size(), 9U);
}

TEST(LoadHistory, OtherExpertsAreLeftOut) {
  LoadHistory history;
  history.add(1, rows_of_step(1));
  Rows fewer = rows_of_step(2);
  fewer.pop_back();
  EXPECT_FALSE(history.add(2, fewer));
  Rows wider = rows_of_step(2);
  wider[1].rows.push_back(1);
  EXPECT_FALSE(history.add(2, wider));
  Rows others = rows_of_step(2);
  others[0].layer = 2;
  EXPECT_FALSE(history.add(2, others));
  EXPECT_EQ(history.stretches().size(), 1U);
  EXPECT_EQ(history.stretches()[0][0].rows, (std::vector<double>{1, 1}));
}

}  // namespace
}  // namespace troupe
