// Rows in 8 bits against the format's formulas, written out here; what rounding does to gradients;
// and rows that were not received.
#include "ops/exchange/coded_rows/coded_rows.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "value_test_support.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

// The nearest number with 3 bits of mantissa, an exponent of -6 at least, and at most 448; ties to
// even.
double nearest_code(double value) {
  const int exponent = std::max(-6, value == 0 ? -6 : std::ilogb(value));
  const double step = std::ldexp(1, exponent - 3);
  return std::clamp(std::nearbyint(value / step) * step, -448.0, 448.0);
}

Numbers coded_numbers(const Numbers& x) {
  Numbers y(x.size());
  for (size_t first = 0; first < x.size(); first += 32) {
    double largest = 0;
    for (size_t i = first; i < first + 32; ++i) largest = std::max(largest, std::fabs(x[i]));
    const double scale = largest == 0 ? 1 : std::exp2(std::ceil(std::log2(largest / 448)));
    for (size_t i = first; i < first + 32; ++i) y[i] = nearest_code(x[i] / scale) * scale;
  }
  return y;
}

// Blocks of many sizes of numbers, and one of zeros.
Numbers test_numbers(int64_t count, DType dtype) {
  Numbers x = normal_numbers(count, 1);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2(static_cast<double>(i / 32) * 7 - 60);
  std::fill(x.begin() + 32, x.begin() + 64, 0);
  x[64] = 448 * std::exp2(-46);  // the largest of its block has the largest code, exactly
  for (size_t i = 65; i < 96; ++i) x[i] = std::min(x[i], x[64]);
  for (double& value : x) {
    const auto narrow = static_cast<float>(value);
    value = dtype == DType::bf16 ? static_cast<float>(bf16(narrow)) : narrow;
  }
  return x;
}

constexpr int64_t kCodedRows = 4;
constexpr int64_t kCodedElements = 160;

class CodedRows : public ::testing::TestWithParam<DType> {};

TEST_P(CodedRows, AreCodesAndPowersOfTwo) {
  const Numbers x = test_numbers(kCodedRows * kCodedElements, GetParam());
  const auto results = run_sample(
      [&](SampleBuilder& sample) {
        SampleBuilder::Options constant;
        constant.differentiable = false;
        const ValueId rows = sample.values("x", {kCodedRows, kCodedElements}, x, constant);
        const ValueId coded = encode_rows(sample.builder(), rows, "coded");
        EXPECT_EQ(sample.builder().value(coded).shape, Shape({kCodedRows, 176}));
        sample.result_without_gradient(
            decode_rows(sample.builder(), coded, {},
                        {.dtype = GetParam(), .elements = kCodedElements}, "decoded"));
        sample.result_without_gradient(round_rows(sample.builder(), rows, "rounded"));
      },
      GetParam(), 2);
  const Numbers expected = coded_numbers(x);
  EXPECT_NE(expected, x);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(results[0][i], expected[i]) << "element " << i << ", " << x[i];
    EXPECT_EQ(results[1][i], expected[i]) << "element " << i << ", " << x[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CodedRows, ::testing::Values(DType::f64, DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(CodedRows, NanIsOfItsBlockAndInfinityIsTheLargest) {
  Numbers x(96, 1);
  x[3] = std::numeric_limits<double>::quiet_NaN();
  x[40] = -std::numeric_limits<double>::infinity();
  const Numbers y = run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    const ValueId rows = sample.values("x", {1, 96}, x, constant);
    sample.result_without_gradient(round_rows(sample.builder(), rows, "y"));
  })[0];
  EXPECT_TRUE(std::all_of(y.begin(), y.begin() + 32, [](double v) { return std::isnan(v); }));
  EXPECT_EQ(y[40], -448 * std::exp2(127));
  EXPECT_EQ(y[41], 0);
  EXPECT_EQ(y[64], 1);
}

// The gradient of x, of the same gradient of x + c whatever `mark` does to x before.
Numbers gradient_through(ValueId (*mark)(Builder&, ValueId, const std::string&)) {
  SampleRun run({"",
                 [&](SampleBuilder& sample) {
                   const ValueId x = sample.tensor("x", {2, 64});
                   const ValueId c = sample.tensor("c", {2, 64});
                   const ValueId marked = mark(sample.builder(), x, "marked");
                   sample.result(add(sample.builder(), marked, c, "y"));
                 }},
                {});
  run.run();
  return run.gradients()[0];
}

TEST(CodedRows, GradientsPassOrAreRounded) {
  const auto nothing = [](Builder&, ValueId x, const std::string&) { return x; };
  const Numbers gradient = gradient_through(nothing);
  EXPECT_EQ(gradient_through(round_rows), gradient);
  EXPECT_EQ(gradient_through(round_gradient), coded_numbers(gradient));
  EXPECT_NE(coded_numbers(gradient), gradient);
}

TEST(CodedRows, WhatWasNotReceivedIsNotWritten) {
  const auto results = run_sample([&](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {6, 32});
    const ValueId received = sample.integers("received", {3}, {1, 0, 2});
    const ValueId coded = encode_rows(sample.builder(), x, "coded");
    sample.result_without_gradient(decode_rows(sample.builder(), coded, received,
                                               {.dtype = DType::f64, .elements = 32}, "decoded"));
    sample.result_without_gradient(round_rows(sample.builder(), x, "rounded"));
  });
  for (int64_t row = 0; row < 6; ++row) {
    const auto decoded = results[0].begin() + row * 32;
    EXPECT_EQ(std::equal(decoded, decoded + 32, results[1].begin() + row * 32),
              row == 0 || row >= 4)
        << "row " << row;
  }
}

}  // namespace
}  // namespace troupe::testing
