// The results of router_topk against a naive computation in double, and its rules for ties and NaN.
#include "ops/router_topk/router_topk.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

struct Selection {
  std::vector<double> probabilities;
  std::vector<double> indices;
};

Selection run_router_topk(const std::vector<double>& logits, int64_t experts,
                          const RouterTopkAttributes& attributes, DType dtype = DType::f64) {
  const OpSample sample{"", [&](SampleBuilder& builder) {
                          const auto tokens = static_cast<int64_t>(logits.size()) / experts;
                          const ValueId z = builder.values("logits", {tokens, experts}, logits,
                                                           SampleBuilder::Options());
                          const auto result =
                              router_topk(builder.builder(), z, attributes, "probabilities");
                          builder.result(result.probabilities);
                          builder.result(result.indices);
                        }};
  SampleRun run(sample, {.dtype = dtype, .backward = false});
  run.run();
  return {run.results()[0], run.results()[1]};
}

class RouterTopk : public ::testing::TestWithParam<bool> {};

TEST_P(RouterTopk, AgreesWithANaiveComputation) {
  constexpr int64_t kTokens = 200;
  constexpr int64_t kExperts = 37;
  constexpr int kTopK = 5;
  constexpr double kScale = 2.5;
  const bool pre_softmax = GetParam();
  std::vector<double> logits;
  for (uint64_t i = 0; i < kTokens * kExperts; ++i) {
    logits.push_back(3 * random_normal(5, RandomStream::test, 0, i));
  }
  const RouterTopkAttributes attributes{
      .top_k = kTopK, .pre_softmax = pre_softmax, .scaling_factor = kScale};
  const auto actual = run_router_topk(logits, kExperts, attributes);
  for (int64_t token = 0; token < kTokens; ++token) {
    const double* z = logits.data() + token * kExperts;
    std::vector<int> order(kExperts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[a] > z[b]; });
    double total = 0;
    for (int i = 0; i < (pre_softmax ? kExperts : kTopK); ++i) {
      total += std::exp(z[order[static_cast<size_t>(i)]]);
    }
    for (int slot = 0; slot < kTopK; ++slot) {
      const auto at = static_cast<size_t>(token * kTopK + slot);
      const int expert = order[static_cast<size_t>(slot)];
      EXPECT_EQ(actual.indices[at], expert) << "token " << token << " slot " << slot;
      // Double arithmetic over 37 terms.
      EXPECT_NEAR(actual.probabilities[at], kScale * std::exp(z[expert]) / total, 1e-13);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Order, RouterTopk, ::testing::Bool(), [](const auto& info) {
  return info.param ? "PreSoftmax" : "PostSoftmax";
});

TEST(RouterTopkRules, TheLowerExpertWinsATie) {
  for (const bool pre_softmax : {false, true}) {
    const auto actual = run_router_topk({1, 3, 3, 0, 3, 0,  //
                                         2, 2, 2, 2, 2, 2},
                                        6, {.top_k = 2, .pre_softmax = pre_softmax});
    EXPECT_EQ(actual.indices, (std::vector<double>{1, 2, 0, 1}));
  }
}

TEST(RouterTopkRules, LargeLogitsDoNotOverflow) {
  const auto actual = run_router_topk({3000, 2999, -3000}, 3, {.top_k = 2}, DType::f32);
  EXPECT_EQ(actual.indices, (std::vector<double>{0, 1}));
  // Single precision: a few times 6e-8.
  EXPECT_NEAR(actual.probabilities[0], 1 / (1 + std::exp(-1.0)), 5e-7);
}

TEST(RouterTopkRules, IndicesAreDistinctExpertsEvenWithoutNumbers) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const auto actual = run_router_topk({nan, nan, nan, nan,            //
                                       1, nan, 2, nan,                //
                                       -infinity, 5, nan, -infinity,  //
                                       nan, infinity, 1, -infinity},
                                      4, {.top_k = 3});
  EXPECT_EQ(actual.indices, (std::vector<double>{0, 1, 2,  //
                                                 2, 0, 1,  //
                                                 1, 0, 2,  //
                                                 1, 2, 0}));
}

}  // namespace
}  // namespace troupe::testing
