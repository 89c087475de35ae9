// The values of the router's losses and of its entropy, against naive computations in double and
// known special cases.
#include <algorithm>
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include "base/random.h"
#include "ops/losses/load_balancing_loss/load_balancing_loss.h"
#include "ops/losses/router_entropy/router_entropy.h"
#include "ops/losses/router_z_loss/router_z_loss.h"
#include "ops/routing/count_experts/count_experts.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

// Enough tokens for several chunks.
constexpr int64_t kLossTokens = 3000;
constexpr int64_t kLossExperts = 19;

double run_loss(const std::function<ValueId(SampleBuilder&)>& build) {
  const OpSample sample{"", [&](SampleBuilder& builder) { builder.result(build(builder)); }};
  SampleRun run(sample, {.dtype = DType::f64, .backward = false});
  run.run();
  return run.results()[0][0];
}

std::vector<double> random_logits() {
  std::vector<double> logits;
  for (uint64_t i = 0; i < kLossTokens * kLossExperts; ++i) {
    logits.push_back(2 * random_normal(6, RandomStream::test, 0, i));
  }
  return logits;
}

double load_balancing(const std::vector<double>& logits, const std::vector<int32_t>& counts,
                      const LoadBalancingLossAttributes& attributes) {
  return run_loss([&](SampleBuilder& builder) {
    const auto experts = static_cast<int64_t>(counts.size()) / attributes.sequences;
    const auto tokens = static_cast<int64_t>(logits.size()) / experts;
    const ValueId z = builder.values("logits", {tokens, experts}, logits, SampleBuilder::Options());
    const ValueId n =
        builder.integers("counts", expert_counts_shape(attributes.sequences, experts), counts);
    return load_balancing_loss(builder.builder(), z, n, attributes, "loss");
  });
}

std::vector<int32_t> some_counts(int32_t sequences) {
  std::vector<int32_t> counts;
  for (int32_t i = 0; i < sequences * kLossExperts; ++i) counts.push_back(i * i % 700);
  return counts;
}

double naive_score(ScoreFunction function, double z) {
  if (function == ScoreFunction::softmax) return std::exp(z);
  if (function == ScoreFunction::sigmoid) return 1 / (1 + std::exp(-z));
  return std::sqrt(std::log(1 + std::exp(z)));
}

// c * E / (k * T^2) * sum_e (sum_t q_te) * n_e
double naive_load_balancing(const std::vector<double>& logits, const std::vector<double>& counts,
                            const LoadBalancingLossAttributes& attributes) {
  const size_t experts = counts.size();
  const auto tokens = static_cast<double>(logits.size() / experts);
  std::vector<double> scores(experts, 0);
  for (size_t row = 0; row < logits.size(); row += experts) {
    double total = 0;
    for (size_t i = 0; i < experts; ++i) {
      total += naive_score(attributes.score_function, logits[row + i]);
    }
    for (size_t i = 0; i < experts; ++i) {
      scores[i] += naive_score(attributes.score_function, logits[row + i]) / total;
    }
  }
  double sum = 0;
  for (size_t i = 0; i < experts; ++i) sum += scores[i] * counts[i];
  return attributes.coefficient * static_cast<double>(experts) /
         (attributes.top_k * tokens * tokens) * sum;
}

constexpr ScoreFunction kScoreFunctions[] = {ScoreFunction::softmax, ScoreFunction::sigmoid,
                                             ScoreFunction::sqrtsoftplus};

TEST(LoadBalancingLoss, AgreesWithANaiveComputation) {
  const auto logits = random_logits();
  const auto counts = some_counts(1);
  for (const ScoreFunction function : kScoreFunctions) {
    const LoadBalancingLossAttributes attributes{
        .coefficient = 0.01, .top_k = 4, .score_function = function};
    const double expected =
        naive_load_balancing(logits, {counts.begin(), counts.end()}, attributes);
    // Double arithmetic over 57,000 terms in another order.
    EXPECT_NEAR(load_balancing(logits, counts, attributes), expected, 1e-12 * expected)
        << name_of(function);
  }
}

TEST(LoadBalancingLoss, IsTheMeanOverSequences) {
  constexpr int32_t kSequences = 5;
  const auto logits = random_logits();
  const auto counts = some_counts(kSequences);
  for (const ScoreFunction function : kScoreFunctions) {
    const LoadBalancingLossAttributes one{
        .coefficient = 0.01, .top_k = 4, .score_function = function};
    double expected = 0;
    for (int64_t g = 0; g < kSequences; ++g) {
      const int64_t size = static_cast<int64_t>(logits.size()) / kSequences;
      const std::vector<double> z(logits.begin() + g * size, logits.begin() + (g + 1) * size);
      const std::vector<double> n(counts.begin() + g * kLossExperts,
                                  counts.begin() + (g + 1) * kLossExperts);
      expected += naive_load_balancing(z, n, one) / kSequences;
    }
    LoadBalancingLossAttributes attributes = one;
    attributes.sequences = kSequences;
    // As above.
    EXPECT_NEAR(load_balancing(logits, counts, attributes), expected, 1e-12 * expected)
        << name_of(function);
  }
}

TEST(LoadBalancingLoss, DividesRunningSumsByTheirNumber) {
  const auto logits = random_logits();
  const auto counts = some_counts(1);
  std::vector<double> means;
  for (const int32_t count : counts) means.push_back(count / 3.0);
  const LoadBalancingLossAttributes attributes{.coefficient = 0.01, .top_k = 4, .steps = 3};
  const double expected = naive_load_balancing(logits, means, attributes);
  // As above.
  EXPECT_NEAR(load_balancing(logits, counts, attributes), expected, 1e-12 * expected);
}

TEST(LoadBalancingLoss, IsTheCoefficientWhenBalanced) {
  // 6 tokens, 4 experts, 2 of them each: 3 tokens for each expert. Rounding of double.
  for (const ScoreFunction function : kScoreFunctions) {
    LoadBalancingLossAttributes attributes{
        .coefficient = 0.3, .top_k = 2, .score_function = function};
    const std::vector<double> uniform(24, 0.7);
    EXPECT_NEAR(load_balancing(uniform, {3, 3, 3, 3}, attributes), 0.3, 1e-15);
    attributes.steps = 5;
    EXPECT_NEAR(load_balancing(uniform, {15, 15, 15, 15}, attributes), 0.3, 1e-15);
    // Two sequences of 2 tokens: 1 token for each expert.
    attributes.sequences = 2;
    attributes.steps = 1;
    const std::vector<double> short_uniform(16, -0.2);
    EXPECT_NEAR(load_balancing(short_uniform, {1, 1, 1, 1, 1, 1, 1, 1}, attributes), 0.3, 1e-15);
  }
}

// Scores that underflow leave neither NaN in the loss nor in its gradient.
TEST(LoadBalancingLoss, SurvivesExtremeLogits) {
  for (const ScoreFunction function : kScoreFunctions) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const OpSample sample{
          "", [&](SampleBuilder& builder) {
            const ValueId z = builder.values(
                "logits", {2, 3}, {-2000, -2000, -2000, 2000, -2000, 0}, SampleBuilder::Options());
            const ValueId n = builder.integers("counts", {3}, {2, 1, 1});
            builder.result(load_balancing_loss(
                builder.builder(), z, n, {.coefficient = 1, .top_k = 2, .score_function = function},
                "loss"));
          }};
      SampleRun run(sample, {.dtype = dtype});
      run.run();
      EXPECT_TRUE(std::isfinite(run.results()[0][0])) << name_of(function);
      const std::vector<double> gradients = run.gradients()[0];
      ASSERT_EQ(gradients.size(), 6U);
      for (const double gradient : gradients) {
        EXPECT_TRUE(std::isfinite(gradient)) << name_of(function);
      }
    }
  }
}

// A batch with padding, and the same without the padded tokens.
struct PaddedBatch {
  std::vector<double> logits = random_logits();
  std::vector<int32_t> mask;
  std::vector<double> valid_logits;
  int32_t valid = 0;

  PaddedBatch() {
    for (int64_t token = 0; token < kLossTokens; ++token) {
      mask.push_back(token * token % 11 < 4 ? 0 : 1);
      if (mask.back() == 0) continue;
      const auto row = logits.begin() + token * kLossExperts;
      valid_logits.insert(valid_logits.end(), row, row + kLossExperts);
      ++valid;
    }
  }
  ValidTokens tokens(SampleBuilder& builder) const {
    return {.mask = builder.integers("valid", {kLossTokens}, mask),
            .count = builder.integers("count", {1}, {valid})};
  }
};

using RouterLoss = std::function<ValueId(SampleBuilder&, ValueId logits, const ValidTokens&)>;

// Value and gradients of a loss of the batch with padding are those of the loss of the valid tokens
// alone, and no gradient reaches padding.
void expect_without_padding(const RouterLoss& masked, const RouterLoss& alone) {
  const PaddedBatch batch;
  const OpSample padded{"", [&](SampleBuilder& builder) {
                          const ValueId z = builder.values("logits", {kLossTokens, kLossExperts},
                                                           batch.logits, SampleBuilder::Options());
                          builder.result(masked(builder, z, batch.tokens(builder)));
                        }};
  const OpSample valid{"", [&](SampleBuilder& builder) {
                         const ValueId z =
                             builder.values("logits", {batch.valid, kLossExperts},
                                            batch.valid_logits, SampleBuilder::Options());
                         builder.result(alone(builder, z, {}));
                       }};
  SampleRun with_padding(padded, {.threads = 3});
  SampleRun without(valid, {});
  with_padding.run();
  without.run();
  const double expected = without.results()[0][0];
  ASSERT_GT(expected, 0);
  // Double arithmetic over tens of thousands of terms in chunks that begin elsewhere.
  EXPECT_NEAR(with_padding.results()[0][0], expected, 1e-12 * expected);
  const std::vector<double> gradients = with_padding.gradients()[0];
  const std::vector<double> of_valid = without.gradients()[0];
  double largest = 0;
  for (const double gradient : of_valid) largest = std::max(largest, std::abs(gradient));
  size_t at = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (batch.mask[i / kLossExperts] == 0) {
      ASSERT_EQ(gradients[i], 0) << i;
    } else {
      // A few operations for each: rounding of the factor and of the token's own numbers.
      ASSERT_NEAR(gradients[i], of_valid[at++], 1e-14 * largest) << i;
    }
  }
}

TEST(RouterZLoss, LeavesPaddingOut) {
  const RouterLoss loss = [](SampleBuilder& builder, ValueId z, const ValidTokens& valid) {
    return router_z_loss(builder.builder(), z, {.coefficient = 0.3}, "loss", valid);
  };
  expect_without_padding(loss, loss);
}

// `choices`: of all experts, that their counts must add up to.
std::vector<int32_t> counts_of(int32_t choices) {
  std::vector<int32_t> counts = some_counts(1);
  int32_t sum = 0;
  for (const int32_t count : counts) sum += count;
  counts.back() += choices - sum;
  return counts;
}

TEST(LoadBalancingLoss, LeavesPaddingOut) {
  const PaddedBatch batch;
  for (const int32_t steps : {1, 3}) {
    for (const ScoreFunction function : kScoreFunctions) {
      SCOPED_TRACE(std::string(name_of(function)) + " " + std::to_string(steps));
      const LoadBalancingLossAttributes attributes{
          .coefficient = 0.3, .top_k = 6, .score_function = function, .steps = steps};
      const RouterLoss loss = [&](SampleBuilder& builder, ValueId z, const ValidTokens& valid) {
        const ValueId n =
            builder.integers("counts", {kLossExperts}, counts_of(6 * batch.valid * steps));
        return load_balancing_loss(builder.builder(), z, n, attributes, "loss", valid);
      };
      expect_without_padding(loss, loss);
    }
  }
}

// Two sequences with other numbers of valid tokens, against two losses of one each.
TEST(LoadBalancingLoss, GivesEachSequenceItsOwnTokens) {
  const PaddedBatch batch;
  constexpr size_t kHalf = kLossTokens / 2;
  int32_t first = 0;
  for (size_t token = 0; token < kHalf; ++token) first += batch.mask[token];
  // Nearly all of the second sequence is padding.
  std::vector<int32_t> mask = batch.mask;
  std::fill(mask.begin() + kHalf + 5, mask.end(), 0);
  mask[kHalf] = 1;
  int32_t second = 0;
  for (size_t token = kHalf; token < kLossTokens; ++token) second += mask[token];
  ASSERT_NE(first, second);
  const std::vector<int32_t> counts_of_first = counts_of(6 * first);
  std::vector<int32_t> counts_of_second(kLossExperts, 0);
  counts_of_second[3] = 2 * second;
  counts_of_second[4] = 4 * second;
  std::vector<int32_t> counts = counts_of_first;
  counts.insert(counts.end(), counts_of_second.begin(), counts_of_second.end());
  const double found = run_loss([&](SampleBuilder& builder) {
    const ValueId z = builder.values("logits", {kLossTokens, kLossExperts}, batch.logits,
                                     SampleBuilder::Options());
    const ValueId n = builder.integers("counts", {2, kLossExperts}, counts);
    const ValidTokens valid{.mask = builder.integers("valid", {kLossTokens}, mask),
                            .count = builder.integers("count", {1}, {first + second})};
    return load_balancing_loss(builder.builder(), z, n,
                               {.coefficient = 0.3, .top_k = 6, .sequences = 2}, "loss", valid);
  });
  double expected = 0;
  for (const bool is_second : {false, true}) {
    std::vector<double> logits;
    for (size_t token = is_second ? kHalf : 0; token < (is_second ? kLossTokens : kHalf); ++token) {
      if (mask[token] == 0) continue;
      const auto row = batch.logits.begin() + static_cast<int64_t>(token) * kLossExperts;
      logits.insert(logits.end(), row, row + kLossExperts);
    }
    const std::vector<int32_t>& own = is_second ? counts_of_second : counts_of_first;
    expected +=
        naive_load_balancing(logits, {own.begin(), own.end()}, {.coefficient = 0.3, .top_k = 6}) /
        2;
  }
  EXPECT_NEAR(found, expected, 1e-12 * expected);  // as above
}

TEST(LoadBalancingLoss, IsTheCoefficientWhenBalancedWithPadding) {
  // The third of three micro-batches, with 9 valid tokens together and 3 in this one.
  const double found = run_loss([](SampleBuilder& builder) {
    const ValueId z =
        builder.values("logits", {5, 4}, std::vector<double>(20, 0.7), SampleBuilder::Options());
    const ValueId n = builder.integers("counts", {4}, {5, 5, 4, 4});
    const ValidTokens valid{.mask = builder.integers("valid", {5}, {0, 1, 1, 0, 1}),
                            .count = builder.integers("count", {1}, {3})};
    return load_balancing_loss(builder.builder(), z, n,
                               {.coefficient = 0.3, .top_k = 2, .steps = 3}, "loss", valid);
  });
  EXPECT_NEAR(found, 0.3, 1e-15);  // rounding of double
}

TEST(RouterEntropy, LeavesPaddingOut) {
  const PaddedBatch batch;
  const double padded = run_loss([&](SampleBuilder& builder) {
    const ValueId z = builder.values("logits", {kLossTokens, kLossExperts}, batch.logits,
                                     SampleBuilder::Options());
    return router_entropy(builder.builder(), z, "entropy", batch.tokens(builder));
  });
  const double valid = run_loss([&](SampleBuilder& builder) {
    const ValueId z = builder.values("logits", {batch.valid, kLossExperts}, batch.valid_logits,
                                     SampleBuilder::Options());
    return router_entropy(builder.builder(), z, "entropy");
  });
  EXPECT_NEAR(padded, valid, 1e-12 * valid);  // as above
}

TEST(RouterEntropy, AgreesWithANaiveComputation) {
  const auto logits = random_logits();
  double expected = 0;
  for (size_t row = 0; row < logits.size(); row += kLossExperts) {
    double total = 0;
    for (size_t i = row; i < row + kLossExperts; ++i) total += std::exp(logits[i]);
    for (size_t i = row; i < row + kLossExperts; ++i) {
      const double q = std::exp(logits[i]) / total;
      expected -= q * std::log(q) / kLossTokens;
    }
  }
  const double actual = run_loss([&](SampleBuilder& builder) {
    const ValueId z =
        builder.values("logits", {kLossTokens, kLossExperts}, logits, SampleBuilder::Options());
    return router_entropy(builder.builder(), z, "entropy");
  });
  // Double arithmetic over 57,000 terms in another order.
  EXPECT_NEAR(actual, expected, 1e-12 * expected);
}

TEST(RouterEntropy, IsTheLogarithmOfTheNumberOfExpertsThatAreAlike) {
  const double never = -std::numeric_limits<double>::infinity();
  const double actual = run_loss([&](SampleBuilder& builder) {
    const ValueId z = builder.values("logits", {2, 4}, {3, 3, 3, 3, never, 1, never, 1},
                                     SampleBuilder::Options());
    return router_entropy(builder.builder(), z, "entropy");
  });
  EXPECT_NEAR(actual, (std::log(4.0) + std::log(2.0)) / 2, 1e-15);  // rounding of double
}

TEST(RouterZLoss, AgreesWithANaiveComputation) {
  const auto logits = random_logits();
  double sum = 0;
  for (int64_t token = 0; token < kLossTokens; ++token) {
    double total = 0;
    for (int64_t i = 0; i < kLossExperts; ++i) {
      total += std::exp(logits[static_cast<size_t>(token * kLossExperts + i)]);
    }
    sum += std::log(total) * std::log(total);
  }
  const double expected = 0.001 * sum / kLossTokens;
  const double actual = run_loss([&](SampleBuilder& builder) {
    const ValueId z =
        builder.values("logits", {kLossTokens, kLossExperts}, logits, SampleBuilder::Options());
    return router_z_loss(builder.builder(), z, {.coefficient = 0.001}, "loss");
  });
  // Double arithmetic over 57,000 terms in another order.
  EXPECT_NEAR(actual, expected, 1e-12 * expected);
}

}  // namespace
}  // namespace troupe::testing
