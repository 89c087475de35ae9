// The values of the router's losses, against naive computations in double and known special cases.
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <vector>

#include "base/random.h"
#include "ops/load_balancing_loss/load_balancing_loss.h"
#include "ops/router_z_loss/router_z_loss.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

// Enough tokens for several chunks.
constexpr int64_t kTokens = 3000;
constexpr int64_t kExperts = 19;

double run_loss(const std::function<ValueId(SampleBuilder&)>& build) {
  const OpSample sample{"", [&](SampleBuilder& builder) { builder.result(build(builder)); }};
  SampleRun run(sample, {.dtype = DType::f64, .backward = false});
  run.run();
  return run.results()[0][0];
}

std::vector<double> random_logits() {
  std::vector<double> logits;
  for (uint64_t i = 0; i < kTokens * kExperts; ++i) {
    logits.push_back(2 * random_normal(6, RandomStream::test, 0, i));
  }
  return logits;
}

double load_balancing(const std::vector<double>& logits, const std::vector<int32_t>& counts,
                      double coefficient, int32_t top_k) {
  return run_loss([&](SampleBuilder& builder) {
    const auto experts = static_cast<int64_t>(counts.size());
    const auto tokens = static_cast<int64_t>(logits.size()) / experts;
    const ValueId z = builder.values("logits", {tokens, experts}, logits, SampleBuilder::Options());
    const ValueId n = builder.integers("counts", {experts}, counts);
    return load_balancing_loss(builder.builder(), z, n,
                               {.coefficient = coefficient, .top_k = top_k}, "loss");
  });
}

TEST(LoadBalancingLoss, AgreesWithANaiveComputation) {
  const auto logits = random_logits();
  std::vector<int32_t> counts;
  for (int32_t expert = 0; expert < kExperts; ++expert) counts.push_back(expert * expert % 700);
  std::vector<double> scores(kExperts, 0);
  for (int64_t token = 0; token < kTokens; ++token) {
    const double* z = logits.data() + token * kExperts;
    double total = 0;
    for (int64_t i = 0; i < kExperts; ++i) total += std::exp(z[i]);
    for (int64_t i = 0; i < kExperts; ++i) scores[static_cast<size_t>(i)] += std::exp(z[i]) / total;
  }
  double sum = 0;
  for (size_t i = 0; i < scores.size(); ++i) sum += scores[i] * counts[i];
  const double expected = 0.01 * kExperts / (4.0 * kTokens * kTokens) * sum;
  // Double arithmetic over 57,000 terms in another order.
  EXPECT_NEAR(load_balancing(logits, counts, 0.01, 4), expected, 1e-12 * expected);
}

TEST(LoadBalancingLoss, IsTheCoefficientWhenBalanced) {
  // 6 tokens, 4 experts, 2 of them each: 3 tokens for each expert. Rounding of double.
  EXPECT_NEAR(load_balancing(std::vector<double>(24, 0.7), {3, 3, 3, 3}, 0.3, 2), 0.3, 1e-15);
}

TEST(RouterZLoss, AgreesWithANaiveComputation) {
  const auto logits = random_logits();
  double sum = 0;
  for (int64_t token = 0; token < kTokens; ++token) {
    double total = 0;
    for (int64_t i = 0; i < kExperts; ++i) {
      total += std::exp(logits[static_cast<size_t>(token * kExperts + i)]);
    }
    sum += std::log(total) * std::log(total);
  }
  const double expected = 0.001 * sum / kTokens;
  const double actual = run_loss([&](SampleBuilder& builder) {
    const ValueId z =
        builder.values("logits", {kTokens, kExperts}, logits, SampleBuilder::Options());
    return router_z_loss(builder.builder(), z, {.coefficient = 0.001}, "loss");
  });
  // Double arithmetic over 57,000 terms in another order.
  EXPECT_NEAR(actual, expected, 1e-12 * expected);
}

}  // namespace
}  // namespace troupe::testing
