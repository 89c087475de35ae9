// Route, permute and combine against naive computations.
#include "ops/route/route.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "base/random.h"
#include "ops/combine/combine.h"
#include "ops/permute/permute.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

constexpr int64_t kTokens = 7001;  // several chunks
constexpr int64_t kTopK = 6;
constexpr int32_t kExperts = 40;

// Distinct experts for each token, in no order; expert 11 is never chosen; one slot in nine
// dropped.
std::vector<int32_t> random_indices() {
  std::vector<int32_t> indices;
  uint64_t counter = 0;
  const auto draw = [&] {
    const double u = std::abs(random_normal(7, RandomStream::test, 0, counter++)) * 1e6;
    return static_cast<int32_t>(std::fmod(u, kExperts));
  };
  for (int64_t token = 0; token < kTokens; ++token) {
    std::vector<int32_t> chosen;
    while (static_cast<int64_t>(chosen.size()) < kTopK) {
      const int32_t expert = draw();
      if (expert != 11 && std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) {
        chosen.push_back(expert);
      }
    }
    for (int32_t& expert : chosen) {
      if (draw() % 9 == 0) expert = -1;
    }
    indices.insert(indices.end(), chosen.begin(), chosen.end());
  }
  return indices;
}

struct Plan {
  std::vector<double> counts;
  std::vector<double> offsets;
  std::vector<double> row_slot;
  std::vector<double> slot_row;
};

Plan run_route(const std::vector<int32_t>& indices, int64_t top_k, int32_t experts, int threads) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const auto tokens = static_cast<int64_t>(indices.size()) / top_k;
        const ValueId chosen = builder.integers("indices", {tokens, top_k}, indices);
        const Routing routing = route(builder.builder(), chosen, {.experts = experts}, "routing");
        EXPECT_EQ(routing.top_k, top_k);
        EXPECT_EQ(routing.experts, experts);
        for (const ValueId id :
             {routing.counts, routing.offsets, routing.row_slot, routing.slot_row}) {
          builder.result(id);
        }
      }};
  SampleRun run(sample, {.threads = threads, .backward = false});
  run.run();
  const auto results = run.results();
  return {results[0], results[1], results[2], results[3]};
}

Plan naive_plan(const std::vector<int32_t>& indices, int32_t experts) {
  Plan plan;
  plan.slot_row.assign(indices.size(), -1);
  for (int32_t expert = 0; expert < experts; ++expert) {
    plan.offsets.push_back(static_cast<double>(plan.row_slot.size()));
    for (size_t slot = 0; slot < indices.size(); ++slot) {
      if (indices[slot] != expert) continue;
      plan.slot_row[slot] = static_cast<double>(plan.row_slot.size());
      plan.row_slot.push_back(static_cast<double>(slot));
    }
    plan.counts.push_back(static_cast<double>(plan.row_slot.size()) - plan.offsets.back());
  }
  plan.offsets.push_back(static_cast<double>(plan.row_slot.size()));
  return plan;
}

void expect_plan(const Plan& actual, const Plan& expected) {
  EXPECT_EQ(actual.counts, expected.counts);
  EXPECT_EQ(actual.offsets, expected.offsets);
  EXPECT_EQ(actual.row_slot, expected.row_slot);
  EXPECT_EQ(actual.slot_row, expected.slot_row);
}

TEST(Route, AgreesWithANaivePlan) {
  const auto indices = random_indices();
  const Plan expected = naive_plan(indices, kExperts);
  for (const int threads : {1, 3}) {
    SCOPED_TRACE(threads);
    expect_plan(run_route(indices, kTopK, kExperts, threads), expected);
  }
}

TEST(Route, TreatsNumbersThatAreNoExpertAsDropped) {
  expect_plan(run_route({0, 3, -7, 2, 1000000, 2}, 2, 3, 1), naive_plan({0, -1, -1, 2, -1, 2}, 3));
}

TEST(Permute, CopiesEachTokenToItsRows) {
  constexpr int64_t kHidden = 3;
  const auto indices = random_indices();
  std::vector<double> x;
  for (int64_t i = 0; i < kTokens * kHidden; ++i) x.push_back(static_cast<double>(i));
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const ValueId chosen = builder.integers("indices", {kTokens, kTopK}, indices);
        const Routing routing = route(builder.builder(), chosen, {.experts = kExperts}, "routing");
        const ValueId values = builder.values("x", {kTokens, kHidden}, x, SampleBuilder::Options());
        builder.result(permute(builder.builder(), values, routing, "y"));
      }};
  SampleRun run(sample, {.backward = false});
  run.run();
  std::vector<double> expected;
  for (const double slot : naive_plan(indices, kExperts).row_slot) {
    const int64_t token = static_cast<int64_t>(slot) / kTopK;
    for (int64_t column = 0; column < kHidden; ++column) {
      expected.push_back(static_cast<double>(token * kHidden + column));
    }
  }
  EXPECT_EQ(run.results()[0], expected);
}

// One token whose slots name the experts 3, 0, 2, 1: expert e has the row `rows[e]`.
double combine_four(const std::vector<double>& rows, DType dtype) {
  const OpSample sample{"", [&](SampleBuilder& builder) {
                          const ValueId chosen = builder.integers("indices", {1, 4}, {3, 0, 2, 1});
                          const Routing routing =
                              route(builder.builder(), chosen, {.experts = 4}, "routing");
                          SampleBuilder::Options options;
                          options.rows = builder.integers("live_rows", {1}, {4});
                          const ValueId values = builder.values("rows", {4, 1}, rows, options);
                          builder.result(combine(builder.builder(), values, routing, "y"));
                        }};
  SampleRun run(sample, {.dtype = dtype, .backward = false});
  run.run();
  return run.results()[0][0];
}

TEST(Combine, AddsInTheOrderOfTheExperts) {
  // In this order 1e30 cancels first and the ones survive; in the order of the slots they would
  // not.
  EXPECT_EQ(combine_four({1e30, -1e30, 1, 1}, DType::f64), 2);
  EXPECT_EQ(combine_four({1e30, -1e30, 1, 1}, DType::f32), 2);
}

TEST(Combine, RoundsOnceAtTheEnd) {
  // 256 + 1 is not a bf16 number; rounded after each addition the sum would stay 256.
  EXPECT_EQ(combine_four({256, 1, 1, 0}, DType::bf16), 258);
}

}  // namespace
}  // namespace troupe::testing
