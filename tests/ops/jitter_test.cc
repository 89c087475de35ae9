// The distribution of jitter's factors, what they depend on, and that the gradient has the same
// ones.
#include "ops/routing/jitter/jitter.h"

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "base/random.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

struct Result {
  std::vector<double> values;
  std::vector<double> gradient;
};

Result run_jitter(const std::vector<double>& x, int64_t step, const JitterAttributes& attributes,
                  DType dtype = DType::f64) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const ValueId input = builder.values("x", {static_cast<int64_t>(x.size())}, x, {});
        const ValueId step_id = builder.values("step", {1}, {static_cast<double>(step)},
                                               {.differentiable = false, .dtype = DType::i64});
        builder.result(jitter(builder.builder(), input, step_id, attributes, "y"));
      }};
  SampleRun run(sample, {.dtype = dtype});
  run.run();
  return {run.results()[0], run.gradients()[0]};
}

TEST(Jitter, FactorsAreUniform) {
  constexpr size_t kCount = 50001;
  constexpr double kEpsilon = 0.25;
  const auto y = run_jitter(std::vector<double>(kCount, 1), 1, {.seed = 7, .epsilon = kEpsilon});
  double sum = 0;
  double squares = 0;
  double neighbours = 0;
  double previous = 0;
  for (const double value : y.values) {
    const double u = (value - 1) / kEpsilon;
    ASSERT_GE(u, -1);
    ASSERT_LT(u, 1);
    sum += u;
    squares += u * u;
    neighbours += u * previous;
    previous = u;
  }
  // Uniform in [-1, 1): mean 0 and variance 1/3; u^2 has mean 1/3 and variance 1/5 - 1/9 = 4/45;
  // products of independent neighbours have mean 0 and variance 1/9. Bounds: five standard errors.
  const double root = std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(sum / kCount, 0, 5 * std::sqrt(1.0 / 3) / root);
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 5 * std::sqrt(4.0 / 45) / root);
  EXPECT_NEAR(neighbours / kCount, 0, 5 * (1.0 / 3) / root);
}

TEST(Jitter, MultipliesByTheFactorsOfItsStream) {
  std::vector<double> x;
  for (uint64_t i = 0; i < 11; ++i) x.push_back(random_normal(1, RandomStream::test, 0, i));
  const auto y = run_jitter(x, 42, {.seed = 5, .substream = 9, .epsilon = 0.1});
  const uint64_t seed = random_step_seed(5, RandomStream::router_noise, 9, 42);
  for (size_t i = 0; i < x.size(); ++i) {
    const auto words = random_words(seed, RandomStream::router_noise, 9, i / 4);
    const double u = static_cast<int32_t>(words[i % 4]) / 2147483648.0;
    EXPECT_DOUBLE_EQ(y.values[i], x[i] * (1 + 0.1 * u));
    // The gradient: what came back, times the same factor.
    EXPECT_DOUBLE_EQ(y.gradient[i], random_normal(2, RandomStream::test, 0, i) * (1 + 0.1 * u));
  }
}

// Also where they begin within a group of four, which share one index of the stream.
TEST(Jitter, OfARanksRowsIsThatOfTheWhole) {
  const auto whole =
      run_jitter(std::vector<double>(40, 1), 3, {.seed = 1, .substream = 2, .epsilon = 0.1}).values;
  const auto expect = [&](const RowOrigin& origin, const std::vector<size_t>& rows) {
    const auto own = run_jitter(std::vector<double>(rows.size(), 1), 3,
                                {.seed = 1, .substream = 2, .epsilon = 0.1, .origin = origin})
                         .values;
    for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(own[i], whole[rows[i]]) << rows[i];
  };
  expect({.first_row = 3}, {3, 4, 5, 6, 7, 8, 9, 10});
  // The second rank of two has the inner two of each sequence's four chunks.
  expect({.sequence = 6, .chunks = {.ranks = 2, .rank = 1}},
         {3, 4, 5, 6, 7, 8, 15, 16, 17, 18, 19, 20});
}

TEST(Jitter, DependsOnSeedSubstreamAndStepOnly) {
  const std::vector<double> ones(20, 1);
  const JitterAttributes attributes{.seed = 1, .substream = 2, .epsilon = 0.1};
  const auto reference = run_jitter(ones, 3, attributes).values;
  EXPECT_EQ(run_jitter(ones, 3, attributes).values, reference);
  EXPECT_NE(run_jitter(ones, 4, attributes).values, reference);
  EXPECT_NE(run_jitter(ones, 3, {.seed = 2, .substream = 2, .epsilon = 0.1}).values, reference);
  EXPECT_NE(run_jitter(ones, 3, {.seed = 1, .substream = 3, .epsilon = 0.1}).values, reference);
  // The first elements of a longer tensor are those of a shorter one.
  const auto longer = run_jitter(std::vector<double>(20000, 1), 3, attributes).values;
  EXPECT_EQ(std::vector<double>(longer.begin(), longer.begin() + 20), reference);
}

TEST(Jitter, RoundsOnceToTheInputsDtype) {
  const std::vector<double> ones(100, 1);
  const JitterAttributes attributes{.seed = 1, .substream = 2, .epsilon = 0.1};
  const auto exact = run_jitter(ones, 3, attributes, DType::f32).values;
  const auto rounded = run_jitter(ones, 3, attributes, DType::bf16).values;
  for (size_t i = 0; i < ones.size(); ++i) EXPECT_EQ(rounded[i], bf16(exact[i]));
}

}  // namespace
}  // namespace troupe::testing
