// Route, permute and combine against naive computations; and the experts of an MoE layer with
// padded rows against those without.
#include "ops/routing/route/route.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "base/random.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/experts/combine/combine.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/experts/permute/permute.h"
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

Plan run_route(const std::vector<int32_t>& indices, int64_t top_k,
               const RouteAttributes& attributes, int threads) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const auto tokens = static_cast<int64_t>(indices.size()) / top_k;
        const ValueId chosen = builder.integers("indices", {tokens, top_k}, indices);
        const Routing routing = route(builder.builder(), chosen, attributes, "routing");
        EXPECT_EQ(routing.top_k, top_k);
        EXPECT_EQ(routing.experts, attributes.experts);
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

Plan naive_plan(const std::vector<int32_t>& indices, const RouteAttributes& attributes) {
  Plan plan;
  plan.slot_row.assign(indices.size(), -1);
  const auto capacity = static_cast<size_t>(attributes.padded_capacity);
  for (int32_t expert = 0; expert < attributes.experts; ++expert) {
    const size_t first = plan.row_slot.size();
    plan.offsets.push_back(static_cast<double>(first));
    for (size_t slot = 0; slot < indices.size(); ++slot) {
      if (indices[slot] != expert) continue;
      if (capacity != 0 && plan.row_slot.size() == first + capacity) break;
      plan.slot_row[slot] = static_cast<double>(plan.row_slot.size());
      plan.row_slot.push_back(static_cast<double>(slot));
    }
    plan.counts.push_back(static_cast<double>(plan.row_slot.size() - first));
    const auto multiple = static_cast<size_t>(attributes.row_multiple);
    while (capacity != 0 ? plan.row_slot.size() < first + capacity
                         : (plan.row_slot.size() - first) % multiple != 0) {
      plan.row_slot.push_back(-1);
    }
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
  const RouteAttributes plans[] = {
      {.experts = kExperts},
      {.experts = kExperts, .row_multiple = 32},
      {.experts = kExperts, .row_multiple = 100},
      {.experts = kExperts, .padded_capacity = 2000},
      {.experts = kExperts, .padded_capacity = 500},  // fewer than some experts' slots
  };
  for (const RouteAttributes& attributes : plans) {
    const Plan expected = naive_plan(indices, attributes);
    for (const int threads : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << "multiple " << attributes.row_multiple << " capacity "
                                        << attributes.padded_capacity << " threads " << threads);
      expect_plan(run_route(indices, kTopK, attributes, threads), expected);
    }
  }
}

// One slot more than a multiple for every expert: not a row may be missing.
TEST(Route, ReachesTheBoundOfItsRows) {
  const RouteAttributes attributes{.experts = 3, .row_multiple = 4};
  EXPECT_EQ(route_row_bound(7, attributes), 16);
  const Plan plan = run_route({0, 1, 2, 0, 0, 0, 0}, 1, attributes, 1);
  EXPECT_EQ(plan.offsets.back(), 16);
  // Fewer slots than experts: two experts at most have rows.
  EXPECT_EQ(route_row_bound(2, attributes), 8);
  EXPECT_EQ(route_row_bound(7, {.experts = 3}), 7);
  EXPECT_EQ(route_row_bound(7, {.experts = 3, .padded_capacity = 5}), 15);
}

TEST(Route, TreatsNumbersThatAreNoExpertAsDropped) {
  const RouteAttributes attributes{.experts = 3};
  expect_plan(run_route({0, 3, -7, 2, 1000000, 2}, 2, attributes, 1),
              naive_plan({0, -1, -1, 2, -1, 2}, attributes));
}

TEST(Permute, CopiesEachTokenToItsRowsAndFillsTheRestWithZeros) {
  constexpr int64_t kHidden = 3;
  const auto indices = random_indices();
  std::vector<double> x;
  for (int64_t i = 0; i < kTokens * kHidden; ++i) x.push_back(static_cast<double>(i));
  for (const RouteAttributes& attributes :
       {RouteAttributes{.experts = kExperts},
        RouteAttributes{.experts = kExperts, .row_multiple = 64},
        RouteAttributes{.experts = kExperts, .padded_capacity = 1500}}) {
    const OpSample sample{
        "", [&](SampleBuilder& builder) {
          const ValueId chosen = builder.integers("indices", {kTokens, kTopK}, indices);
          const Routing routing = route(builder.builder(), chosen, attributes, "routing");
          const ValueId values =
              builder.values("x", {kTokens, kHidden}, x, SampleBuilder::Options());
          builder.result(permute(builder.builder(), values, routing, "y"));
        }};
    SampleRun run(sample, {.oracle = true, .backward = false});
    // Twice: the oracle leaves NaN where the second run writes its rows.
    run.run();
    run.run();
    std::vector<double> expected;
    for (const double slot : naive_plan(indices, attributes).row_slot) {
      const int64_t token = static_cast<int64_t>(slot) / kTopK;
      for (int64_t column = 0; column < kHidden; ++column) {
        expected.push_back(slot < 0 ? 0 : static_cast<double>(token * kHidden + column));
      }
    }
    EXPECT_EQ(run.results()[0], expected)
        << "multiple " << attributes.row_multiple << " capacity " << attributes.padded_capacity;
  }
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

// What an MoE layer's experts compute: the result, and the gradients of tokens, router weights and
// both weights, in this order.
struct ExpertsRun {
  std::vector<double> result;
  std::vector<std::vector<double>> gradients;
};

ExpertsRun run_experts(const std::vector<int32_t>& indices, const RouteAttributes& attributes,
                       bool oracle) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        constexpr int64_t kHidden = 7;
        constexpr int64_t kWidth = 5;
        const int64_t experts = attributes.experts;
        const Shape slots{static_cast<int64_t>(indices.size()) / 2, 2};
        // Before the indices: random numbers depend on the order of the inputs.
        const ValueId x = builder.tensor("x", {slots[0], kHidden});
        SampleBuilder::Options options;
        options.accumulation = true;
        const ValueId weights = builder.tensor("weights", slots, options);
        const ValueId up = builder.tensor("up", {experts, 2 * kWidth, kHidden});
        const ValueId down = builder.tensor("down", {experts, kHidden, kWidth});
        const ValueId chosen = builder.integers("indices", slots, indices);
        Builder& b = builder.builder();
        const Routing routing = route(b, chosen, attributes, "routing");
        const ValueId rows = permute(b, x, routing, "rows");
        const ValueId gate_up = grouped_linear(b, rows, up, routing.offsets, "gate_up");
        const ValueId activated =
            activation(b, gate_up, weights, routing.row_slot, {}, "activated");
        const ValueId out = grouped_linear(b, activated, down, routing.offsets, "out");
        builder.result(combine(b, out, routing, "y"));
      }};
  SampleRun run(sample, {.threads = 2, .oracle = oracle});
  // Twice: the oracle leaves NaN where the second run expects its filler rows.
  run.run();
  run.run();
  return {run.results()[0], run.gradients()};
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    // Double arithmetic; zero rows may change how a sum of some 20 products of order one to a
    // hundred is cut.
    ASSERT_NEAR(actual[i], expected[i], 1e-12 * std::max(1.0, std::abs(expected[i]))) << i;
  }
}

TEST(PaddedExperts, ComputeWhatUnpaddedExpertsCompute) {
  // 40 tokens; expert 4 is never chosen; slots are dropped, and token 7 has none.
  std::vector<int32_t> indices;
  for (int32_t token = 0; token < 40; ++token) {
    const int32_t first = token * token % 4;
    indices.push_back(token % 9 == 7 ? -1 : first);
    indices.push_back(token % 6 == 1 ? -1 : (first == 3 ? 5 : first + 1));
  }
  const ExpertsRun plain = run_experts(indices, {.experts = 6}, false);
  for (size_t slot = 0; slot < indices.size(); ++slot) {
    if (indices[slot] >= 0) continue;
    EXPECT_EQ(plain.gradients[1][slot], 0.0) << "dropped slot " << slot;
  }
  for (const RouteAttributes& attributes : {RouteAttributes{.experts = 6, .row_multiple = 16},
                                            RouteAttributes{.experts = 6, .padded_capacity = 45}}) {
    for (const bool oracle : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "multiple " << attributes.row_multiple << " capacity "
                                        << attributes.padded_capacity << " oracle " << oracle);
      const ExpertsRun padded = run_experts(indices, attributes, oracle);
      expect_near(padded.result, plain.result);
      for (size_t input = 0; input < 4; ++input) {
        SCOPED_TRACE(input);
        expect_near(padded.gradients[input], plain.gradients[input]);
      }
      for (size_t slot = 0; slot < indices.size(); ++slot) {
        if (indices[slot] >= 0) continue;
        EXPECT_EQ(padded.gradients[1][slot], 0.0) << "dropped slot " << slot;
      }
    }
  }
}

}  // namespace
}  // namespace troupe::testing
