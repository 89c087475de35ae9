// The values of the gradient norm and the clip coefficient.
#include "ops/optimizer/gradient_norm/gradient_norm.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "support/sample_run.h"

namespace troupe::testing {
namespace {

struct Clip {
  double squared;
  double norm;
  double coefficient;
  double skip;
};

Clip run_clip(const std::vector<std::vector<double>>& gradients, double max_norm,
              DType dtype = DType::f32) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        std::vector<ValueId> ids;
        for (const auto& gradient : gradients) {
          ids.push_back(builder.values("gradient", {static_cast<int64_t>(gradient.size())},
                                       gradient, SampleBuilder::Options()));
        }
        const ValueId squares = squared_norm(builder.builder(), ids, {}, "squares");
        const auto clip =
            clip_coefficient(builder.builder(), squares, {.max_norm = max_norm}, "norm");
        for (const ValueId id : {squares, clip.norm, clip.coefficient, clip.skip}) {
          builder.result_without_gradient(id);
        }
      }};
  SampleRun run(sample, {.dtype = dtype, .backward = false});
  run.run();
  const auto results = run.results();
  return {results[0][0], results[1][0], results[2][0], results[3][0]};
}

TEST(GradientNorm, SumsTheSquaresOfAllTensors) {
  // Small integers: every sum is exact.
  std::vector<double> many(100001);
  double expected = 0;
  for (size_t i = 0; i < many.size(); ++i) {
    many[i] = static_cast<double>(i % 13) - 6;
    expected += many[i] * many[i];
  }
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Clip clip = run_clip({{3}, many, {-1, 2, -2}}, 0, dtype);
    EXPECT_EQ(clip.squared, expected + 18);
    EXPECT_EQ(clip.norm, std::sqrt(expected + 18));
    EXPECT_EQ(clip.coefficient, 1);
    EXPECT_EQ(clip.skip, 0);
  }
}

TEST(GradientNorm, SumsSinglePrecisionInDouble) {
  // In single precision the sum of 1 and 30,000 squares of 1e-4 would stay 1.
  std::vector<double> gradient(30001, 1.0 / 8192);
  gradient[0] = 1;
  EXPECT_EQ(run_clip({gradient}, 0).squared, 1 + 30000.0 / 8192 / 8192);
}

TEST(GradientNorm, ClipsToTheLargestNorm) {
  const Clip clipped = run_clip({{3}, {4}}, 1);
  EXPECT_EQ(clipped.norm, 5);
  EXPECT_DOUBLE_EQ(clipped.coefficient, 1 / (5 + 1e-6));
  EXPECT_EQ(run_clip({{3}, {4}}, 5.1).coefficient, 1);
}

TEST(GradientNorm, SkipsWhenTheNormIsNotFinite) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const Clip clip = run_clip({{1, bad}, {2}}, 1);
    EXPECT_EQ(clip.skip, 1);
    EXPECT_EQ(clip.coefficient, 1);
    EXPECT_FALSE(std::isfinite(clip.norm));
  }
  // Finite in single precision, and its square in double.
  EXPECT_EQ(run_clip({{3e38, 3e38}}, 1).skip, 0);
}

TEST(GradientNorm, SkipsNormsAboveItsLimit) {
  const auto skip = [](double skip_norm) {
    const OpSample sample{
        "", [&](SampleBuilder& builder) {
          const ValueId squares =
              builder.values("squares", {1}, {25}, {.differentiable = false, .dtype = DType::f64});
          builder.result_without_gradient(clip_coefficient(builder.builder(), squares,
                                                           {.max_norm = 1, .skip_norm = skip_norm},
                                                           "norm")
                                              .skip);
        }};
    SampleRun run(sample, {.backward = false});
    run.run();
    return run.results()[0][0];
  };
  EXPECT_EQ(skip(std::numeric_limits<double>::infinity()), 0);
  EXPECT_EQ(skip(5), 0) << "the norm itself is not above it";
  EXPECT_EQ(skip(4.99), 1);
}

TEST(GradientNorm, CountsZeros) {
  std::vector<double> many(100001);
  double expected = 0;
  for (size_t i = 0; i < many.size(); ++i) {
    many[i] = i % 7 == 3 ? 0.0 : 1e-30;
    expected += many[i] == 0 ? 1 : 0;
  }
  many[3] = -0.0;
  const OpSample sample{"", [&](SampleBuilder& builder) {
                          const std::vector<ValueId> gradients = {
                              builder.values("many", {static_cast<int64_t>(many.size())}, many, {}),
                              builder.values("few", {3}, {0, 1, 0}, {})};
                          builder.result_without_gradient(squared_norm(
                              builder.builder(), gradients, {.term = NormTerm::zero}, "zeros"));
                        }};
  for (const DType dtype : {DType::f32, DType::f64}) {
    SampleRun run(sample, {.dtype = dtype, .backward = false});
    run.run();
    EXPECT_EQ(run.results()[0][0], expected + 2);
  }
}

}  // namespace
}  // namespace troupe::testing
