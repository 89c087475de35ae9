// Random layouts compute what one rank computes (support/random_layouts.h).
#include "support/random_layouts.h"

#include <gtest/gtest.h>
#include <string>

#include "support/layout_run.h"

namespace troupe::testing {
namespace {

constexpr int kLayouts = 320;

class RandomLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(RandomLayout, EqualsOneRank) {
  const LayoutCase& c = GetParam();
  SCOPED_TRACE("to reproduce: build/tests/layout_tests --gtest_filter='*RandomLayout*/" + c.name +
               "'");
  expect_same_outcome(run_one_rank(c), run_layout(c));
}

INSTANTIATE_TEST_SUITE_P(Layouts, RandomLayout, ::testing::ValuesIn(random_layouts(kLayouts)),
                         [](const auto& info) { return info.param.name; });

TEST(RandomLayouts, HaveLayersOfMultiTokenPredictionInAnyStages) {
  bool on_two_ranks = false;
  bool one_of_all_depths = false;
  for (const LayoutCase& c : random_layouts(kLayouts)) {
    const auto run = run_layout_of(c);
    const bool with_loss_alone = run->partition.stages.back().first_mtp_layer == 0;
    if (with_loss_alone) continue;
    on_two_ranks |= run->partition.mtp_ranks().size() > 1;
    one_of_all_depths |= c.model.mtp_use_repeated_layer && c.model.mtp_num_layers > 1;
  }
  EXPECT_TRUE(on_two_ranks);
  EXPECT_TRUE(one_of_all_depths);
}

}  // namespace
}  // namespace troupe::testing
