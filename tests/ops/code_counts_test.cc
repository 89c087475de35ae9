// Which codes count as saturated and which as 0. (The generic tests compare runs with each other.)
#include "ops/precision/code_counts/code_counts.h"

#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "ops/precision/quantize/quantize.h"
#include "value_test_support.h"

namespace troupe::testing {
namespace {

// Of codes by a scale that covers numbers up to `largest`.
std::vector<double> counts_of_codes(const std::vector<double>& x, DType format, double largest) {
  return run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    const ValueId values = sample.values("x", {1, static_cast<int64_t>(x.size())}, x, constant);
    constant.dtype = DType::f32;
    const ValueId amax = sample.values("amax", {1, 1}, {largest}, constant);
    const Codes codes = quantize(sample.builder(), values, {}, amax, {.format = format}, "q").rows;
    sample.result_without_gradient(code_counts(sample.builder(), codes.codes, "counts"));
  })[0];
}

// With the scale 1.
TEST(CodeCounts, OfTheLargestCodeAndOfZero) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(counts_of_codes({448, 432, 431, -500, kInfinite, -1e30, 0, -0.0, 0x1p-10, -0x1p-11,
                             0x1p-9, kNan, 1},
                            DType::f8e4m3, 448),
            (std::vector<double>{13, 5, 4}));
  EXPECT_EQ(counts_of_codes({57344, 53249, 53248, -60000, 0x1p-17, -0x1p-16, 0, kNan},
                            DType::f8e5m2, 57344),
            (std::vector<double>{8, 3, 2}));
}

// Rows that are not live would be elements.
TEST(CodeCounts, OfLiveRowsAlone) {
  const auto results = run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options options;
    options.differentiable = false;
    options.rows = sample.integers("rows", {1}, {2});
    std::vector<double> x(60, 0);
    x[21] = 5;
    x[59] = 5;
    const ValueId values = sample.values("x", {3, 20}, x, options);
    const Codes codes = quantize(sample.builder(), values, {}, {}, {.block = {1, 0}}, "q").rows;
    sample.result_without_gradient(code_counts(sample.builder(), codes.codes, "counts"));
  });
  EXPECT_EQ(results[0], (std::vector<double>{40, 1, 39}));
}

}  // namespace
}  // namespace troupe::testing
