// The plan of a dispatch against its definition, over as many tokens as make several chunks: a
// token has the number of tokens before it that go to the same rank, wherever chunks begin.
#include "ops/routing/dispatch_plan/dispatch_plan.h"

#include <gtest/gtest.h>
#include <vector>

#include "base/random.h"
#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

constexpr int64_t kPlannedTopK = 3;

// Experts at random; every eighth slot has none, and neither has any of some tokens.
std::vector<int32_t> draw_choices(int64_t tokens, int32_t experts) {
  std::vector<int32_t> choices(static_cast<size_t>(tokens * kPlannedTopK));
  for (size_t i = 0; i < choices.size(); ++i) {
    const auto number = static_cast<int32_t>(
        random_below(static_cast<uint64_t>(experts) * 8, /*seed=*/3, RandomStream::test, 4, i));
    const bool is_dropped = number % 8 == 0 || i / kPlannedTopK % 11 == 5;
    choices[i] = is_dropped ? -1 : number / 8;
  }
  return choices;
}

struct Plan {
  std::vector<double> counts;
  std::vector<double> slots;
};

// The header's definition, one token after the other.
Plan naive_plan(const DispatchPlanAttributes& a, const std::vector<int32_t>& choices) {
  Plan plan;
  plan.counts.assign(static_cast<size_t>(a.ranks()), 0);
  for (size_t first = 0; first < choices.size(); first += kPlannedTopK) {
    std::vector<double> slots(plan.counts.size(), -1);
    for (size_t i = first; i < first + kPlannedTopK; ++i) {
      if (choices[i] < 0) continue;
      const int32_t part = choices[i] / (a.experts / a.parts);
      for (int32_t slice = 0; slice < a.slices; ++slice) {
        const auto rank = static_cast<size_t>(part * a.part_stride + slice * a.slice_stride);
        slots[rank] = plan.counts[rank];
      }
    }
    for (size_t rank = 0; rank < slots.size(); ++rank) {
      if (slots[rank] >= 0) ++plan.counts[rank];
    }
    plan.slots.insert(plan.slots.end(), slots.begin(), slots.end());
  }
  return plan;
}

// The CPU kernel counts in chunks of 4096 tokens.
TEST(DispatchPlan, NumbersTokensAcrossChunks) {
  const DispatchPlanAttributes slices_last{
      .experts = 12, .parts = 3, .slices = 2, .part_stride = 1, .slice_stride = 3};
  const DispatchPlanAttributes slices_first{
      .experts = 8, .parts = 4, .slices = 2, .part_stride = 2, .slice_stride = 1};
  for (const DispatchPlanAttributes& a : {slices_last, slices_first}) {
    for (const int64_t tokens : {5, 4096, 4097, 2 * 4096 + 3}) {
      SCOPED_TRACE(::testing::Message() << a.parts << " parts, " << tokens << " tokens");
      const std::vector<int32_t> choices = draw_choices(tokens, a.experts);
      const Plan expected = naive_plan(a, choices);
      const auto results = run_sample(
          [&](SampleBuilder& sample) {
            const ValueId indices = sample.integers("indices", {tokens, kPlannedTopK}, choices);
            const DispatchPlan plan = dispatch_plan(sample.builder(), indices, a, "plan");
            sample.result_without_gradient(plan.counts);
            sample.result_without_gradient(plan.slots);
          },
          DType::f64, 2);
      EXPECT_EQ(results[0], expected.counts);
      EXPECT_TRUE(results[1] == expected.slots) << "the tokens' places";
    }
  }
}

}  // namespace
}  // namespace troupe::testing
