// The distribution of random_logits, what it depends on, the gradient that passes through, and that
// a router given them spreads its tokens.
#include "ops/routing/random_logits/random_logits.h"

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "base/random.h"
#include "ops/routing/router_topk/router_topk.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

struct Result {
  std::vector<double> values;
  std::vector<double> gradient;
};

Result run_random_logits(const std::vector<double>& logits, int64_t step,
                         const RandomLogitsAttributes& attributes) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const ValueId z =
            builder.values("logits", {static_cast<int64_t>(logits.size())}, logits, {});
        const ValueId step_id = builder.values("step", {1}, {static_cast<double>(step)},
                                               {.differentiable = false, .dtype = DType::i64});
        builder.result(random_logits(builder.builder(), z, step_id, attributes, "random"));
      }};
  SampleRun run(sample, {});
  run.run();
  return {run.results()[0], run.gradients()[0]};
}

TEST(RandomLogits, AreStandardNormal) {
  constexpr size_t kCount = 50000;
  const auto z = run_random_logits(std::vector<double>(kCount, 100), 1, {.seed = 7}).values;
  double sum = 0;
  double squares = 0;
  double neighbours = 0;
  double previous = 0;
  for (const double value : z) {
    sum += value;
    squares += value * value;
    neighbours += value * previous;
    previous = value;
  }
  // z^2 has mean 1 and variance 2; products of independent neighbours have mean 0 and variance 1.
  // Bounds: five standard errors.
  const double root = std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(sum / kCount, 0, 5 / root);
  EXPECT_NEAR(squares / kCount, 1, 5 * std::sqrt(2.0) / root);
  EXPECT_NEAR(neighbours / kCount, 0, 5 / root);
}

// 3000 are several blocks; the first one of the rank is number 7 of the whole.
TEST(RandomLogits, AreThoseOfTheirPlacesInTheWhole) {
  const auto z = run_random_logits(std::vector<double>(3000, 0), 5,
                                   {.seed = 7, .substream = 2, .origin = {.first_row = 7}})
                     .values;
  const uint64_t seed = random_step_seed(7, RandomStream::random_logits, 2, 5);
  for (size_t i = 0; i < z.size(); ++i) {
    ASSERT_EQ(z[i], random_normal(seed, RandomStream::random_logits, 2, 7 + i)) << i;
  }
}

TEST(RandomLogits, GradientPassesStraightThrough) {
  const auto result = run_random_logits(std::vector<double>(10, 0), 1, {.seed = 7});
  ASSERT_EQ(result.gradient.size(), 10U);
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(result.gradient[i], random_normal(2, RandomStream::test, 0, i));
  }
}

TEST(RandomLogits, DependOnSeedSubstreamAndStepOnly) {
  const std::vector<double> zeros(20, 0);
  const RandomLogitsAttributes attributes{.seed = 1, .substream = 2};
  const auto reference = run_random_logits(zeros, 3, attributes).values;
  EXPECT_EQ(run_random_logits(std::vector<double>(20, 5), 3, attributes).values, reference);
  EXPECT_NE(run_random_logits(zeros, 4, attributes).values, reference);
  EXPECT_NE(run_random_logits(zeros, 3, {.seed = 2, .substream = 2}).values, reference);
  EXPECT_NE(run_random_logits(zeros, 3, {.seed = 1, .substream = 3}).values, reference);
  const auto longer = run_random_logits(std::vector<double>(5000, 0), 3, attributes).values;
  EXPECT_EQ(std::vector<double>(longer.begin(), longer.begin() + 20), reference);
}

// The bias of an expert is one number for all tokens; below 0 it is that of every step.
TEST(RandomLogits, BiasIsOneNumberForEachExpert) {
  constexpr int64_t kTokens = 40;
  constexpr int64_t kExperts = 6;
  const auto bias_of = [&](int64_t step, double bias, uint32_t layer) {
    const auto run = [&](double deviation) {
      const OpSample sample{
          "", [&](SampleBuilder& builder) {
            const ValueId z = builder.values("logits", {kTokens, kExperts},
                                             std::vector<double>(kTokens * kExperts), {});
            const ValueId step_id = builder.values("step", {1}, {static_cast<double>(step)},
                                                   {.differentiable = false, .dtype = DType::i64});
            builder.result(random_logits(
                builder.builder(), z, step_id,
                {.seed = 7, .substream = 3, .bias = deviation, .bias_substream = layer}, "random"));
          }};
      SampleRun each(sample, {.dtype = DType::f64, .threads = 2});
      each.run();
      return each.results()[0];
    };
    const std::vector<double> with = run(bias);
    const std::vector<double> without = run(0);
    std::vector<double> found;
    for (size_t i = 0; i < with.size(); ++i) {
      const double difference = with[i] - without[i];
      if (i < kExperts) found.push_back(difference);
      EXPECT_NEAR(difference, found[i % kExperts], 1e-14);  // the sum of two numbers near 1
    }
    return found;
  };
  const std::vector<double> first = bias_of(1, 0.5, 0);
  for (size_t e = 0; e < kExperts; ++e) {
    const uint64_t seed = random_step_seed(7, RandomStream::logit_bias, 0, 1);
    EXPECT_NEAR(first[e], 0.5 * random_normal(seed, RandomStream::logit_bias, 0, e), 1e-14);
  }
  const auto differ = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::abs(a[0] - b[0]) > 1e-6;
  };
  EXPECT_TRUE(differ(first, bias_of(2, 0.5, 0))) << "another step";
  EXPECT_TRUE(differ(first, bias_of(1, 0.5, 1))) << "another layer";
  EXPECT_FALSE(differ(bias_of(1, -0.5, 0), bias_of(2, -0.5, 0))) << "drawn once";
}

TEST(RandomLogits, SpreadTokensOverTheExperts) {
  constexpr int64_t kTokens = 2000;
  constexpr int64_t kExperts = 8;
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        // Every token would choose experts 0 and 1.
        std::vector<double> skewed;
        for (int64_t i = 0; i < kTokens * kExperts; ++i) {
          skewed.push_back(-static_cast<double>(i % kExperts));
        }
        const ValueId z = builder.values("logits", {kTokens, kExperts}, skewed, {});
        const ValueId step =
            builder.values("step", {1}, {1}, {.differentiable = false, .dtype = DType::i64});
        const ValueId random = random_logits(builder.builder(), z, step, {.seed = 3}, "random");
        builder.result(
            router_topk(builder.builder(), {.logits = random}, {.top_k = 2}, "weights").indices);
      }};
  SampleRun run(sample, {.backward = false});
  run.run();
  std::vector<int> load(kExperts, 0);
  const std::vector<double> indices = run.results()[0];
  for (const double expert : indices) ++load[static_cast<size_t>(expert)];
  // A token chooses an expert with probability 1/4: 500 of 2000, standard deviation
  // sqrt(2000 * 1/4 * 3/4) = 19.4; five of those.
  for (const int count : load) EXPECT_NEAR(count, 500, 97);
}

}  // namespace
}  // namespace troupe::testing
