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

}  // namespace
}  // namespace troupe::testing
