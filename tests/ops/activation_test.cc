// Activations against a plain computation from their formulas in double.
#include "ops/elementwise/activation/activation.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include "ops/exchange/coded_rows/coded_rows.h"
#include "ops/value_test_support.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double naive_phi(ActivationFunction function, double x) {
  switch (function) {
    case ActivationFunction::silu:
      return x / (1 + std::exp(-x));
    case ActivationFunction::gelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case ActivationFunction::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x)));
    case ActivationFunction::quick_gelu:
      return x / (1 + std::exp(-1.702 * x));
    case ActivationFunction::relu:
      return std::max(x, 0.0);
    case ActivationFunction::squared_relu:
      return std::max(x, 0.0) * std::max(x, 0.0);
  }
  return kNan;
}

double naive_slope(ActivationFunction function, double x) {
  switch (function) {
    case ActivationFunction::silu: {
      const double s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
    case ActivationFunction::gelu:
      return 0.5 * (1 + std::erf(x / std::sqrt(2.0))) +
             x * std::exp(-x * x / 2) / std::sqrt(2 * kPi);
    case ActivationFunction::gelu_tanh: {
      const double tanh = std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x));
      return 0.5 * (1 + tanh) +
             0.5 * x * (1 - tanh * tanh) * std::sqrt(2 / kPi) * (1 + 3 * 0.044715 * x * x);
    }
    case ActivationFunction::quick_gelu: {
      const double s = 1 / (1 + std::exp(-1.702 * x));
      return s + 1.702 * x * s * (1 - s);
    }
    case ActivationFunction::relu:
      return x > 0 ? 1 : 0;
    case ActivationFunction::squared_relu:
      return 2 * std::max(x, 0.0);
  }
  return kNan;
}

struct Problem {
  ActivationAttributes attributes;
  int64_t f = 1;
  std::vector<double> x = {};
  std::vector<double> dy = {};
  std::vector<double> weights = {};  // empty: none
  std::vector<int32_t> row_slot = {};
  int64_t rows() const { return static_cast<int64_t>(dy.size()) / f; }
};

struct Answer {
  std::vector<double> y;
  std::vector<double> dx;
  std::vector<double> d_weights;
};

Answer naive_activation(const Problem& problem) {
  const auto& [function, gated, stores, clamp, offset] = problem.attributes;
  const auto f = static_cast<size_t>(problem.f);
  const size_t width = gated ? 2 * f : f;
  Answer answer;
  answer.y.resize(problem.dy.size());
  answer.dx.resize(problem.x.size());
  answer.d_weights.resize(problem.weights.size());
  for (size_t r = 0; r < problem.dy.size() / f; ++r) {
    double p = 1;
    int32_t slot = -1;
    if (!problem.weights.empty()) {
      slot = problem.row_slot[r];
      if (slot < 0 || slot >= static_cast<int32_t>(problem.weights.size())) continue;
      p = problem.weights[static_cast<size_t>(slot)];
    }
    for (size_t i = 0; i < f; ++i) {
      const double dy = problem.dy[r * f + i];
      const double g = problem.x[r * width + i];
      double a = 0;
      if (!gated) {
        a = naive_phi(function, g);
        answer.dx[r * width + i] = dy * p * naive_slope(function, g);
      } else {
        const double u = problem.x[r * width + f + i];
        const double bounded_g = clamp > 0 ? std::min(g, clamp) : g;
        const double bounded_u = clamp > 0 ? std::clamp(u, -clamp, clamp) : u;
        const bool passes_g = clamp == 0 || g <= clamp;
        const bool passes_u = clamp == 0 || std::abs(u) <= clamp;
        a = naive_phi(function, bounded_g) * (bounded_u + offset);
        if (passes_g) {
          answer.dx[r * width + i] = dy * p * (bounded_u + offset) * naive_slope(function, g);
        }
        if (passes_u) answer.dx[r * width + f + i] = dy * p * naive_phi(function, bounded_g);
      }
      answer.y[r * f + i] = a * p;
      if (slot >= 0) answer.d_weights[static_cast<size_t>(slot)] += a * dy;
    }
  }
  return answer;
}

Answer run_activation(const Problem& problem, DType dtype, int threads = 2) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const int64_t width = problem.attributes.gated ? 2 * problem.f : problem.f;
        const ValueId x = builder.values("x", {problem.rows(), width}, problem.x, {});
        const ValueId dy = builder.values("dy", {problem.rows(), problem.f}, problem.dy, {});
        ValueId weights;
        ValueId row_slot;
        if (!problem.weights.empty()) {
          weights = builder.values("weights", {static_cast<int64_t>(problem.weights.size()) / 2, 2},
                                   problem.weights, {.accumulation = true});
          row_slot = builder.integers("row_slot", {problem.rows()}, problem.row_slot);
        }
        const std::vector<ValueId> forward = builder.builder().emit(
            kActivation, Attributes(problem.attributes), {x, weights, row_slot}, "y");
        builder.result(forward[0]);
        std::vector<ValueId> read = {x, dy, weights, row_slot};
        if (problem.attributes.stores_input) read = {{}, dy, weights, row_slot, forward[1]};
        for (const ValueId gradient : builder.builder().emit(
                 kActivationGradient, Attributes(problem.attributes), read, "d_x")) {
          builder.result(gradient);
        }
      }};
  SampleRun run(sample, {.dtype = dtype, .threads = threads, .backward = false});
  run.run();
  auto results = run.results();
  results.resize(3);
  return {results[0], results[1], results[2]};
}

std::vector<double> spread(size_t count, double amplitude, double phase) {
  std::vector<double> values;
  for (size_t i = 0; i < count; ++i) {
    values.push_back(amplitude * std::sin(phase + 2.399 * static_cast<double>(i)));
  }
  return values;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                 double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i])))
        << what << " " << i;
  }
}

// Values up to 6 reach the flat ends of all functions. Rows of 600 are more than a block and
// no multiple of a vector; two of the six slots have no row, three rows have no slot.
Problem make_problem(const ActivationAttributes& attributes, bool weighted) {
  Problem problem{.attributes = attributes, .f = 601};
  const size_t f = 601;
  problem.x = spread(7 * (attributes.gated ? 2 * f : f), 6, 0.3);
  problem.dy = spread(7 * f, 1.5, 1.1);
  if (weighted) {
    problem.weights = spread(6, 0.8, 0.7);
    problem.row_slot = {4, -1, 0, 3, 6, 1, -9};
  }
  return problem;
}

TEST(Activation, AgreesWithTheFormulas) {
  std::vector<ActivationAttributes> cases;
  for (int function = 0; function <= static_cast<int>(ActivationFunction::squared_relu);
       ++function) {
    const auto named = static_cast<ActivationFunction>(function);
    cases.push_back({.function = named});
    cases.push_back({.function = named, .gated = false});
    cases.push_back({.function = named, .clamp = 2.5});
    cases.push_back({.function = named, .clamp = 3, .linear_offset = 1});
    cases.push_back({.function = named, .linear_offset = -0.5});
  }
  for (const ActivationAttributes& attributes : cases) {
    for (const bool weighted : {false, true}) {
      const Problem problem = make_problem(attributes, weighted);
      const std::string what = kActivation.print_attributes(Attributes(attributes)) +
                               (weighted ? " weighted" : " unweighted");
      const Answer expected = naive_activation(problem);
      // A few roundings of numbers up to 250, and up to 601 terms in the weights' gradients.
      const Answer in_double = run_activation(problem, DType::f64);
      expect_near(in_double.y, expected.y, 1e-13, what + " f64 y");
      expect_near(in_double.dx, expected.dx, 1e-13, what + " f64 dx");
      expect_near(in_double.d_weights, expected.d_weights, 1e-11, what + " f64 d_weights");
      // Ten roundings of 6e-8, the arguments' own rounding (6e-8 times a slope of up to 12, times
      // |u| of up to 7) included, and 601 terms of up to 250 in the weights' gradients.
      const Answer in_single = run_activation(problem, DType::f32);
      expect_near(in_single.y, expected.y, 5e-6, what + " f32 y");
      expect_near(in_single.dx, expected.dx, 5e-6, what + " f32 dx");
      expect_near(in_single.d_weights, expected.d_weights, 2e-3, what + " f32 d_weights");
    }
  }
}

// The edges belong to the open side: there the clamp does nothing and the gradient passes.
TEST(Activation, ClampPassesItsEdges) {
  Problem problem{.attributes = {.clamp = 2, .linear_offset = 1}, .f = 6};
  const double above = 2 + 1e-9;
  problem.x = {2, 2, 2, above, above, -50, /* u */ 2, -2, above, -above, 0.5, -2};
  problem.dy = {1, 1, 1, 1, 1, 1};
  const Answer answer = run_activation(problem, DType::f64);
  const double at_edge = naive_phi(ActivationFunction::silu, 2);
  const double slope = naive_slope(ActivationFunction::silu, 2);
  expect_near(answer.y, {3 * at_edge, -at_edge, 3 * at_edge, -at_edge, 1.5 * at_edge, 0}, 1e-15,
              "y");
  expect_near(answer.dx,
              {3 * slope, -slope, 3 * slope, 0, 0, 0, at_edge, at_edge, 0, 0, at_edge, 0}, 1e-15,
              "dx");
}

// A filler row may hold anything, and gives zeros that are exactly zero.
TEST(Activation, FillerRowsAreZeroAndNotRead) {
  for (const bool gated : {true, false}) {
    Problem problem = make_problem({.gated = gated}, true);
    const Answer clean = run_activation(problem, DType::f32);
    const auto f = static_cast<size_t>(problem.f);
    const size_t width = gated ? 2 * f : f;
    for (const size_t row : {1, 4, 6}) {
      std::fill_n(problem.x.begin() + static_cast<int64_t>(row * width), width, kNan);
      std::fill_n(problem.dy.begin() + static_cast<int64_t>(row * f), f, kNan);
    }
    const Answer filled = run_activation(problem, DType::f32);
    EXPECT_EQ(filled.y, clean.y);
    EXPECT_EQ(filled.dx, clean.dx);
    EXPECT_EQ(filled.d_weights, clean.d_weights);
    for (const size_t row : {1, 4, 6}) {
      for (size_t i = 0; i < f; ++i) ASSERT_EQ(filled.y[row * f + i], 0) << row;
      for (size_t i = 0; i < width; ++i) ASSERT_EQ(filled.dx[row * width + i], 0) << row;
    }
    EXPECT_EQ(filled.d_weights[2], 0) << "a slot without a row";
    EXPECT_EQ(filled.d_weights[5], 0) << "a slot without a row";
  }
}

TEST(Activation, BrokenNumbersStayVisible) {
  for (int function = 0; function <= static_cast<int>(ActivationFunction::squared_relu);
       ++function) {
    for (const double clamp : {0.0, 7.0}) {
      Problem problem{
          .attributes = {.function = static_cast<ActivationFunction>(function), .clamp = clamp},
          .f = 2};
      problem.x = {kNan, 1, 1, kNan};
      problem.dy = {1, 1};
      const Answer answer = run_activation(problem, DType::f32);
      EXPECT_TRUE(std::isnan(answer.y[0])) << "gate, function " << function;
      EXPECT_TRUE(std::isnan(answer.y[1])) << "linear half, function " << function;
    }
  }
}

TEST(Activation, PrintsWhatDiffersFromTheUsual) {
  const auto print = [](const ActivationAttributes& attributes) {
    return kActivation.print_attributes(Attributes(attributes));
  };
  EXPECT_EQ(print({}), "function=silu gated=1");
  EXPECT_EQ(print({.function = ActivationFunction::squared_relu, .gated = false}),
            "function=squared_relu gated=0");
  EXPECT_EQ(print({.function = ActivationFunction::quick_gelu, .clamp = 7, .linear_offset = 1}),
            "function=quick_gelu gated=1 clamp=7 linear_offset=1");
}

// The result is that of x, the gradient that at its coded rows.
TEST(Activation, DifferentiatesAtTheStoredInput) {
  for (const bool gated : {false, true}) {
    for (const bool weighted : {false, true}) {
      Problem problem = make_problem({.gated = gated, .stores_input = true}, weighted);
      problem.f = 96;
      problem.x.resize(static_cast<size_t>(7 * problem.f * (gated ? 2 : 1)));
      problem.dy.resize(static_cast<size_t>(7 * problem.f));
      problem.x[3] = 5000;  // makes others of its block coarse
      const Answer found = run_activation(problem, DType::f64);
      expect_near(found.y, naive_activation(problem).y, 1e-13, "y");

      const int64_t width = static_cast<int64_t>(problem.x.size()) / 7;
      const auto rounded = run_sample([&](SampleBuilder& builder) {
        const ValueId x = builder.values("x", {7, width}, problem.x, {});
        builder.result(round_rows(builder.builder(), x, "rounded"));
      });
      ASSERT_NE(rounded[0], problem.x);
      problem.x = rounded[0];
      const Answer expected = naive_activation(problem);
      expect_near(found.dx, expected.dx, 1e-13, "dx");
      if (weighted) expect_near(found.d_weights, expected.d_weights, 1e-13, "d_weights");
      // In bf16 decoded numbers are as they are, and each result is rounded once, by 2^-9.
      expect_near(run_activation(problem, DType::bf16).dx, expected.dx, 0.01, "dx in bf16");
    }
  }
}

}  // namespace
}  // namespace troupe::testing
