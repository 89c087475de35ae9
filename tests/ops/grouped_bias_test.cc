// Expert biases against a plain computation, with experts without rows, filler rows, and a main
// gradient that several uses of the bias add up in.
#include "ops/experts/grouped_bias/grouped_bias.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "support/main_gradient.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

constexpr int64_t kBound = 300;    // more than one group of rows
constexpr int64_t kColumns = 261;  // more than one tile of columns
constexpr int64_t kExperts = 5;
// The first, third and last experts have no rows.
const std::vector<int32_t> kOffsets = {0, 0, 141, 141, 290, 290};

size_t expert_of(size_t row) {
  size_t e = 0;
  while (static_cast<size_t>(kOffsets[e + 1]) <= row) ++e;
  return e;
}

std::vector<double> waves(size_t count, double phase) {
  std::vector<double> values;
  for (size_t i = 0; i < count; ++i) {
    values.push_back(std::sin(phase + 1.7 * static_cast<double>(i)));
  }
  return values;
}

// A permutation of the slots of the bound's rows in which every seventh row is a filler.
std::vector<int32_t> slots_with_fillers() {
  std::vector<int32_t> slots;
  for (int32_t r = 0; r < kBound; ++r) slots.push_back(r % 7 == 3 ? -1 : r * 11 % kBound);
  return slots;
}

void expect_all_near(const std::vector<double>& actual, const std::vector<double>& expected,
                     double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance) << what << " " << i;
  }
}

TEST(GroupedBias, AgreesWithTheFormulas) {
  const auto live = static_cast<size_t>(kOffsets.back());
  const auto columns = static_cast<size_t>(kColumns);
  const auto x = waves(static_cast<size_t>(kBound) * columns, 0.1);
  const auto dy = waves(static_cast<size_t>(kBound) * columns, 0.9);
  const auto bias = waves(static_cast<size_t>(kExperts) * columns, 0.4);
  const auto probabilities = waves(static_cast<size_t>(kBound), 0.2);
  const auto slots = slots_with_fillers();
  for (const bool weighted : {false, true}) {
    std::vector<double> y(live * columns);
    std::vector<double> d_bias(bias.size());
    std::vector<double> d_probabilities(probabilities.size());
    for (size_t r = 0; r < live; ++r) {
      const int32_t slot = slots[r];
      double p = 1;
      if (weighted) p = slot < 0 ? 0 : probabilities[static_cast<size_t>(slot)];
      for (size_t n = 0; n < columns; ++n) {
        const size_t b = expert_of(r) * columns + n;
        y[r * columns + n] = x[r * columns + n] + p * bias[b];
        d_bias[b] += p * dy[r * columns + n];
        if (slot >= 0) {
          d_probabilities[static_cast<size_t>(slot)] += bias[b] * dy[r * columns + n];
        }
      }
    }
    const OpSample sample{
        "", [&](SampleBuilder& builder) {
          const ValueId offsets = builder.integers("offsets", {kExperts + 1}, kOffsets);
          const SampleBuilder::Options ragged{.rows = offsets, .rows_element = kExperts};
          const ValueId rows = builder.values("x", {kBound, kColumns}, x, ragged);
          const ValueId gradient = builder.values("dy", {kBound, kColumns}, dy, ragged);
          const ValueId b = builder.values("bias", {kExperts, kColumns}, bias, {});
          GroupedBiasOptions options;
          if (weighted) {
            options.probabilities = builder.values("probabilities", {kBound / 3, 3}, probabilities,
                                                   {.accumulation = true});
            options.row_slot = builder.integers("row_slot", {kBound}, slots);
          }
          builder.result(grouped_bias(builder.builder(), rows, b, offsets, options, "y"));
          builder.result(builder.builder().emit(
              kGroupedBiasWeightGradient, Attributes(GroupedBiasWeightGradientAttributes{}),
              {gradient, offsets, options.probabilities, options.row_slot, ValueId{}},
              "d_bias")[0]);
          if (!weighted) return;
          builder.result(builder.builder().emit(
              kGroupedBiasProbabilityGradient, Attributes(NoAttributes()),
              {gradient, b, offsets, options.probabilities, options.row_slot},
              "d_probabilities")[0]);
        }};
    // One product and one sum of numbers up to 1. Sums of up to 290 products: in double most of the
    // difference is the expectation's, which adds one after the other (290 roundings of partial
    // sums up to 145, 1.1e-16 each); in float the lanes' partial sums stay below 20.
    for (const auto& [dtype, tolerance, sum_tolerance] :
         {std::tuple{DType::f64, 1e-15, 5e-12}, std::tuple{DType::f32, 4e-7, 5e-5}}) {
      SampleRun run(sample, {.dtype = dtype, .threads = 2, .backward = false});
      run.run();
      const auto results = run.results();
      const std::string what = std::string(name_of(dtype)) + (weighted ? " weighted" : "");
      expect_all_near(results[0], y, tolerance, what + " y");
      expect_all_near(results[1], d_bias, sum_tolerance, what + " d_bias");
      if (weighted) expect_all_near(results[2], d_probabilities, sum_tolerance, what + " d_p");
      for (size_t n = 0; n < columns; ++n) {
        ASSERT_EQ(results[1][n], 0) << "an expert without rows";
        ASSERT_EQ(results[1][4 * columns + n], 0) << "an expert without rows";
      }
    }
  }
}

// The first product's bias and, weighted, the second's: here one and the same parameter.
TEST(GroupedBias, GradientsAddUpInTheMainGradient) {
  const std::vector<int32_t> offsets = {0, 2, 2, 5};
  const std::vector<double> probabilities = {0.5, 0.25, 2, 4, 1, 3};
  const std::vector<int32_t> slots = {5, 0, -1, 3, 2, 1};
  const auto gradient =
      main_gradient({3, 2}, std::vector<double>(6, 1), [&](SampleBuilder& sample, ValueId bias) {
        const ValueId counts = sample.integers("offsets", {4}, offsets);
        const ValueId p = sample.values("probabilities", {3, 2}, probabilities, {});
        const ValueId row_slot = sample.integers("row_slot", {6}, slots);
        const SampleBuilder::Options ragged{.rows = counts, .rows_element = 3};
        const ValueId x = sample.tensor("x", {6, 2}, ragged);
        sample.result(grouped_bias(sample.builder(), x, bias, counts, {}, "first"));
        sample.result(grouped_bias(sample.builder(), x, bias, counts,
                                   {.probabilities = p, .row_slot = row_slot}, "second"));
      });
  std::vector<double> expected(6);
  for (size_t r = 0; r < 5; ++r) {
    const double p = slots[r] < 0 ? 0 : probabilities[static_cast<size_t>(slots[r])];
    for (size_t n = 0; n < 2; ++n) {
      expected[(r < 2 ? 0 : 4) + n] += (1 + p) * static_cast<double>(2 * r + n + 1);
    }
  }
  EXPECT_EQ(gradient, expected) << "the numbers are exact in double";
}

}  // namespace
}  // namespace troupe::testing
