// The sum of a token's rows: in ascending order of the rows, and so of the experts, whatever the
// order of the slots.
#include "ops/experts/combine/combine.h"

#include <gtest/gtest.h>
#include <vector>

#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

// Row r is for expert r. 2^53 + 1 - 2^53 is 0 in double arithmetic, 2^53 - 2^53 + 1 is 1.
TEST(Combine, SumsInTheOrderOfTheExperts) {
  constexpr double kLarge = 0x1p53;
  const std::vector<double> cancels_first = {kLarge, -kLarge, 1, 0.5};
  const std::vector<double> cancels_last = {kLarge, 1, -kLarge, 0.5};
  const auto sum_of = [](const std::vector<double>& values, const std::vector<int32_t>& slots) {
    return run_sample([&](SampleBuilder& sample) {
      const ValueId chosen = sample.integers("indices", {1, 4}, slots);
      const Routing routing = route(sample.builder(), chosen, {.experts = 4}, "routing");
      const ValueId live = sample.integers("live_rows", {1}, {4});
      const ValueId rows = sample.values("rows", {4, 1}, values, {.rows = live, .rows_element = 0});
      sample.result(combine(sample.builder(), rows, routing, "y"));
    })[0];
  };
  const std::vector<std::vector<int32_t>> orders = {
      {0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3}, {2, 3, 0, 1}, {1, 3, 2, 0}};
  for (const std::vector<int32_t>& slots : orders) {
    EXPECT_EQ(sum_of(cancels_first, slots), std::vector<double>{1.5});
    EXPECT_EQ(sum_of(cancels_last, slots), std::vector<double>{0.5});
  }
}

}  // namespace
}  // namespace troupe::testing
