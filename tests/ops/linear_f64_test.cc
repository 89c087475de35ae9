// Linear maps whose output is f64 while the operands are not, as a router's in f64: everything is
// as exact as double arithmetic on the operands, and rounded once where it leaves for another
// dtype.
#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "ops/products/linear/linear.h"
#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

// The reduction of the weight gradient is long enough to be cut into pieces, that of the map itself
// into panels.
constexpr int64_t kTokens = 2100;
constexpr int64_t kInner = 600;
constexpr int64_t kMatrices = 9;

double rounded(double value, DType dtype) {
  if (dtype == DType::bf16) return static_cast<float>(bf16(value));
  return dtype == DType::f32 ? static_cast<double>(static_cast<float>(value)) : value;
}

Numbers operand(int64_t count, uint32_t number, DType dtype) {
  Numbers values = normal_numbers(count, number);
  for (double& value : values) value = rounded(value, dtype);
  return values;
}

// `bits`: of the significand of what the result was rounded to; 0: it was not.
void expect_rounded(const Numbers& actual, const Numbers& expected, int bits, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    // Sums of at most 2100 products of order one in double, in another order: 1e-11. A rounding to
    // nearest is off by half an ulp: 2^-bits of the value.
    const double rounding = bits == 0 ? 0 : std::ldexp(std::abs(expected[i]), -bits);
    ASSERT_NEAR(actual[i], expected[i], 1e-11 + 1.0001 * rounding) << what << " " << i;
  }
}

TEST(Linear, InDoubleIsExact) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    SCOPED_TRACE(name_of(dtype));
    const Numbers x = operand(kTokens * kInner, 0, dtype);
    const Numbers weight = operand(kMatrices * kInner, 1, dtype);
    const Numbers bias = operand(kMatrices, 2, dtype);
    const auto build = [&](SampleBuilder& sample) {
      Builder& builder = sample.builder();
      const ValueId in = sample.values("x", {kTokens, kInner}, x, {});
      const ValueId w = sample.values("weight", {kMatrices, kInner}, weight, {});
      const ValueId b = sample.values("bias", {kMatrices}, bias, {});
      sample.result(linear(builder, in, w, {.bias = b, .output = LinearOutput::f64}, "logits"));
    };
    SampleRun run({"", build}, {.dtype = dtype});
    run.run();
    const auto results = run.results();
    const auto gradients = run.gradients();

    Numbers y(kTokens * kMatrices);
    Numbers dx(x.size(), 0);
    Numbers dw(weight.size(), 0);
    Numbers db(kMatrices, 0);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t e = 0; e < kMatrices; ++e) {
        const auto at = static_cast<size_t>(t * kMatrices + e);
        // The gradient that SampleRun lets enter at its first result.
        const double g = random_normal(2, RandomStream::test, 0, at);
        y[at] = bias[static_cast<size_t>(e)];
        db[static_cast<size_t>(e)] += g;
        for (int64_t k = 0; k < kInner; ++k) {
          const auto xi = static_cast<size_t>(t * kInner + k);
          const auto wi = static_cast<size_t>(e * kInner + k);
          y[at] += x[xi] * weight[wi];
          dx[xi] += g * weight[wi];
          dw[wi] += g * x[xi];
        }
      }
    }
    const int bits = dtype == DType::f64 ? 0 : 24;
    expect_rounded(results[0], y, 0, "y");
    expect_rounded(gradients[0], dx, dtype == DType::bf16 ? 8 : bits, "dx");
    expect_rounded(gradients[1], dw, bits, "d_weight");
    expect_rounded(gradients[2], db, bits, "d_bias");
  }
}

// A main gradient is stored by the first use and added to by the next: rounded to f32 after each,
// whatever the dtype of the sums.
TEST(Linear, InDoubleAccumulates) {
  const Numbers x = operand(kTokens * 5, 0, DType::f32);
  const Numbers weight = operand(kMatrices * 5, 1, DType::f32);
  const auto results = run_sample(
      [&](SampleBuilder& sample) {
        Builder& builder = sample.builder();
        const ValueId in = sample.values("x", {kTokens, 5}, x, {});
        const ValueId w = sample.values("weight", {kMatrices, 5}, weight, {});
        // Any f64 tensor of the shape of the output serves as its gradient.
        const ValueId dy = linear(builder, in, w, {.bias = {}, .output = LinearOutput::f64}, "dy");
        sample.result(dy);
        const ValueId d_weight = builder.metric("d_weight", DType::f32, {kMatrices, 5});
        const ValueId d_bias = builder.metric("d_bias", DType::f32, {kMatrices});
        for (const bool accumulate : {false, true}) {
          builder.emit(kLinearWeightGradient,
                       Attributes(LinearWeightGradientAttributes{.accumulate = accumulate}),
                       {dy, in, d_weight}, "d_weight");
          builder.emit(kLinearBiasGradient,
                       Attributes(LinearBiasGradientAttributes{.bias_dtype = DType::f32,
                                                               .accumulate = accumulate}),
                       {dy, d_bias}, "d_bias");
        }
        sample.result_without_gradient(d_weight);
        sample.result_without_gradient(d_bias);
      },
      DType::f32, 2);
  const Numbers& dy = results[0];
  Numbers d_weight(weight.size(), 0);
  Numbers d_bias(kMatrices, 0);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t e = 0; e < kMatrices; ++e) {
      const double g = 2 * dy[static_cast<size_t>(t * kMatrices + e)];
      d_bias[static_cast<size_t>(e)] += g;
      for (int64_t k = 0; k < 5; ++k) {
        d_weight[static_cast<size_t>(e * 5 + k)] += g * x[static_cast<size_t>(t * 5 + k)];
      }
    }
  }
  // Two roundings to f32, the first of half the sum.
  expect_rounded(results[1], d_weight, 23, "d_weight");
  expect_rounded(results[2], d_bias, 23, "d_bias");
}

}  // namespace
}  // namespace troupe::testing
