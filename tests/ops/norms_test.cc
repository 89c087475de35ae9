// The values of rms_norm, layer_norm and qk_norm_rope, against the formulas of their headers
// computed plainly in double. Derivatives are covered by the conformance tests; what those cannot
// see, a weight gradient that is stored once and then added to, is tested here.
#include <cmath>
#include <gtest/gtest.h>
#include <tuple>
#include <vector>

#include "ops/attention/rope/rope.h"
#include "ops/norms/layer_norm/layer_norm.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/norms/rms_norm/rms_norm.h"
#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

// Enough rows for several chunks and for several pieces of a sum over rows.
constexpr int64_t kRows = 1700;
constexpr int64_t kHidden = 61;
constexpr double kEpsilon = 1e-3;

// Double arithmetic over sums of at most 1700 terms of order one, in another order.
constexpr double kTolerance = 1e-12;

void expect_near(const Numbers& actual, const Numbers& expected, const char* what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], kTolerance * (1 + std::abs(expected[i])))
        << what << " " << i;
  }
}

struct NormData {
  // A mean away from zero, so that forgetting to subtract it would show.
  explicit NormData(bool with_delta)
      : x(normal_numbers(kRows * kHidden, 0)),
        delta(normal_numbers(kRows * kHidden, 1)),
        gamma(normal_numbers(kHidden, 2)),
        beta(normal_numbers(kHidden, 3)),
        d_out(normal_numbers(kRows * kHidden, 4)),
        sum(x) {
    for (double& value : x) value += 1.5;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = x[i] + (with_delta ? delta[i] : 0);
  }

  Numbers x, delta, gamma, beta, d_out, sum;
};

ValueId tensor(SampleBuilder& sample, const char* name, const Shape& shape, const Numbers& data) {
  return sample.values(name, shape, data, SampleBuilder::Options());
}

class Norms : public ::testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(Norms, RmsNormAgreesWithItsFormula) {
  const auto [with_delta, zero_centered] = GetParam();
  const NormData data(with_delta);
  const RmsNormAttributes attributes{.epsilon = kEpsilon, .zero_centered = zero_centered};
  const auto results = run_sample([&, delta_given = with_delta](SampleBuilder& sample) {
    const ValueId x = tensor(sample, "x", {kRows, kHidden}, data.x);
    const ValueId delta = tensor(sample, "delta", {kRows, kHidden}, data.delta);
    const ValueId gamma = tensor(sample, "gamma", {kHidden}, data.gamma);
    const auto [y, sum] = delta_given
                              ? add_rms_norm(sample.builder(), x, delta, gamma, attributes, "y")
                              : rms_norm(sample.builder(), x, gamma, attributes, "y");
    sample.result(y);
    if (delta_given) sample.result(sum);
  });
  Numbers expected;
  for (int64_t row = 0; row < kRows; ++row) {
    const double* s = data.sum.data() + row * kHidden;
    double squares = 0;
    for (int64_t i = 0; i < kHidden; ++i) squares += s[i] * s[i];
    for (int64_t i = 0; i < kHidden; ++i) {
      const double gain = data.gamma[static_cast<size_t>(i)] + (zero_centered ? 1 : 0);
      expected.push_back(s[i] / std::sqrt(squares / kHidden + kEpsilon) * gain);
    }
  }
  expect_near(results[0], expected, "y");
  if (with_delta) expect_near(results[1], data.sum, "sum");
}

TEST_P(Norms, LayerNormAgreesWithItsFormula) {
  const auto [with_delta, zero_centered] = GetParam();
  const NormData data(with_delta);
  const LayerNormAttributes attributes{.epsilon = kEpsilon, .zero_centered = zero_centered};
  const auto results = run_sample([&, delta_given = with_delta](SampleBuilder& sample) {
    const ValueId x = tensor(sample, "x", {kRows, kHidden}, data.x);
    const ValueId delta = tensor(sample, "delta", {kRows, kHidden}, data.delta);
    const ValueId gamma = tensor(sample, "gamma", {kHidden}, data.gamma);
    const ValueId beta = tensor(sample, "beta", {kHidden}, data.beta);
    const auto [y, sum] =
        delta_given ? add_layer_norm(sample.builder(), x, delta, gamma, beta, attributes, "y")
                    : layer_norm(sample.builder(), x, gamma, beta, attributes, "y");
    sample.result(y);
    if (delta_given) sample.result(sum);
  });
  Numbers expected;
  for (int64_t row = 0; row < kRows; ++row) {
    const double* s = data.sum.data() + row * kHidden;
    double mean = 0;
    double variance = 0;
    for (int64_t i = 0; i < kHidden; ++i) mean += s[i] / kHidden;
    for (int64_t i = 0; i < kHidden; ++i) variance += (s[i] - mean) * (s[i] - mean) / kHidden;
    for (int64_t i = 0; i < kHidden; ++i) {
      const auto column = static_cast<size_t>(i);
      const double gain = data.gamma[column] + (zero_centered ? 1 : 0);
      expected.push_back((s[i] - mean) / std::sqrt(variance + kEpsilon) * gain + data.beta[column]);
    }
  }
  expect_near(results[0], expected, "y");
  if (with_delta) expect_near(results[1], data.sum, "sum");
}

INSTANTIATE_TEST_SUITE_P(Forms, Norms, ::testing::Combine(::testing::Bool(), ::testing::Bool()));

// Where the sum has a gradient of its own, the norm's is added to it before anything is rounded:
// no element is further from the exact sum than half a step of bf16.
TEST(RmsNorm, GradientOfASumIsRoundedOnce) {
  constexpr int64_t kColumns = 512;
  SampleRun run({"",
                 [](SampleBuilder& sample) {
                   const ValueId dy = sample.tensor("dy", {1, kColumns});
                   const ValueId s = sample.tensor("s", {1, kColumns});
                   const ValueId gamma = sample.tensor("gamma", {kColumns}, {.accumulation = true});
                   const ValueId rstd = sample.values("rstd", {1}, {1.0}, {.accumulation = true});
                   const ValueId d_s = sample.tensor("d_s", {1, kColumns});
                   sample.result_without_gradient(
                       sample.builder().emit(kRmsNormGradient, Attributes(RmsNormAttributes{}),
                                             {dy, s, gamma, rstd, d_s}, "dx")[0]);
                 }},
                {.dtype = DType::bf16, .backward = false, .rounded_to = DType::bf16});
  run.run();
  const auto in = [&](size_t input, size_t i) -> double {
    return bf16(run.inputs()[input].data[i]);
  };
  double projection = 0;
  for (size_t i = 0; i < kColumns; ++i) projection += in(0, i) * in(2, i) * in(1, i) / kColumns;
  for (size_t i = 0; i < kColumns; ++i) {
    const double exact = in(4, i) + in(0, i) * in(2, i) - in(1, i) * projection;
    const double step = std::ldexp(1.0, std::ilogb(exact) - 7);
    EXPECT_LE(std::abs(run.results()[0][i] - exact), step / 2 + 1e-5) << i;
  }
}

// In f32 the variance of a row with a mean of 1000 keeps its digits: it is summed about the mean.
TEST(LayerNorm, BearsALargeMean) {
  Numbers x = normal_numbers(64, 0);
  for (double& value : x) value = 1000 + std::round(value * 256) / 256;  // exact in f32
  const auto normalize = [&](DType dtype) {
    return run_sample(
        [&](SampleBuilder& sample) {
          const ValueId gamma = tensor(sample, "gamma", {64}, Numbers(64, 1.0));
          const ValueId beta = tensor(sample, "beta", {64}, Numbers(64, 0.0));
          const ValueId input = tensor(sample, "x", {1, 64}, x);
          sample.result(layer_norm(sample.builder(), input, gamma, beta, {}, "y").normalized);
        },
        dtype)[0];
  };
  const Numbers single = normalize(DType::f32);
  const Numbers reference = normalize(DType::f64);
  // The mean is off by an ulp of 1000 at most, 6e-5, and all that follows by 1e-7. Squares about
  // zero would lose the variance of 1 in an error of 64 ulps of a million.
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(single[i], reference[i], 1.5e-4) << i;
}

TEST(LayerNorm, WeightGradientsAreStoredThenAdded) {
  const NormData data(false);
  Numbers d_gamma(kHidden, 0);
  Numbers d_beta(kHidden, 0);
  for (int64_t row = 0; row < kRows; ++row) {
    const double* s = data.x.data() + row * kHidden;
    const double* dy = data.d_out.data() + row * kHidden;
    double mean = 0;
    double variance = 0;
    for (int64_t i = 0; i < kHidden; ++i) mean += s[i] / kHidden;
    for (int64_t i = 0; i < kHidden; ++i) variance += (s[i] - mean) * (s[i] - mean) / kHidden;
    for (int64_t i = 0; i < kHidden; ++i) {
      const auto column = static_cast<size_t>(i);
      d_gamma[column] += dy[i] * (s[i] - mean) / std::sqrt(variance + kEpsilon);
      d_beta[column] += dy[i];
    }
  }
  for (const int uses : {1, 2, 3}) {
    const auto results = run_sample([&](SampleBuilder& sample) {
      Builder& builder = sample.builder();
      const ValueId x = tensor(sample, "x", {kRows, kHidden}, data.x);
      const ValueId gamma = tensor(sample, "gamma", {kHidden}, data.gamma);
      const ValueId beta = tensor(sample, "beta", {kHidden}, data.beta);
      const ValueId dy = tensor(sample, "dy", {kRows, kHidden}, data.d_out);
      const auto norm = builder.emit(kLayerNorm, Attributes(LayerNormAttributes{kEpsilon, false}),
                                     {x, gamma, beta, ValueId{}}, "y");
      const ValueId gain = builder.metric("d_gamma", DType::f64, {kHidden});
      const ValueId bias = builder.metric("d_beta", DType::f64, {kHidden});
      for (int use = 0; use < uses; ++use) {
        builder.emit(kLayerNormWeightGradient,
                     Attributes(LayerNormWeightGradientAttributes{.accumulate = use > 0}),
                     {dy, x, norm[1], norm[2], gain}, "d_gamma");
        builder.emit(kLayerNormBiasGradient,
                     Attributes(LayerNormBiasGradientAttributes{.accumulate = use > 0}), {dy, bias},
                     "d_beta");
      }
      sample.result_without_gradient(gain);
      sample.result_without_gradient(bias);
    });
    Numbers times_gamma = d_gamma;
    Numbers times_beta = d_beta;
    for (double& value : times_gamma) value *= uses;
    for (double& value : times_beta) value *= uses;
    expect_near(results[0], times_gamma, "d_gamma");
    expect_near(results[1], times_beta, "d_beta");
  }
}

// Both forms, against one naive function over explicit ranges of columns; then each head turns.
TEST(QkNormRope, AgreesWithItsFormula) {
  constexpr int64_t kHeads = 4;
  constexpr int64_t kGroups = 2;
  constexpr int64_t kDim = 7;
  constexpr int64_t kWidth = (kHeads + 2 * kGroups) * kDim;
  constexpr int32_t kRotary = 4;
  constexpr int32_t kSequence = 2;
  constexpr double kBase = 30;
  const Numbers qkv = normal_numbers(kRows * kWidth, 5);
  for (const auto& [scope, zero_centered] :
       {std::pair{QkNormScope::head, false}, std::pair{QkNormScope::head, true},
        std::pair{QkNormScope::projection, false}, std::pair{QkNormScope::projection, true}}) {
    const bool per_head = scope == QkNormScope::head;
    const double offset = zero_centered ? 1 : 0;
    const Numbers gamma_q = normal_numbers(per_head ? kDim : kHeads * kDim, 6);
    const Numbers gamma_k = normal_numbers(per_head ? kDim : kGroups * kDim, 7);
    QkNormAttributes attributes{
        .heads = kHeads, .groups = kGroups, .head_dim = kDim, .epsilon = kEpsilon};
    attributes.scope = scope;
    attributes.zero_centered = zero_centered;
    attributes.rotary_dim = kRotary;
    attributes.sequence = kSequence;
    const auto results = run_sample([&](SampleBuilder& sample) {
      const ValueId x = tensor(sample, "qkv", {kRows, kWidth}, qkv);
      const auto gain_size = [](const Numbers& gain) { return static_cast<int64_t>(gain.size()); };
      const ValueId q = tensor(sample, "gamma_q", {gain_size(gamma_q)}, gamma_q);
      const ValueId k = tensor(sample, "gamma_k", {gain_size(gamma_k)}, gamma_k);
      const ValueId table = rope_table(
          sample.builder(), {.positions = kSequence, .rotary_dim = kRotary, .base = kBase},
          DType::f64, "table");
      sample.result(qk_norm_rope(sample.builder(),
                                 {.qkv = x, .gamma_q = q, .gamma_k = k, .table = table}, attributes,
                                 "y"));
    });
    Numbers expected = qkv;
    const auto normalize = [&](int64_t first, const Numbers& gain) {
      const auto n = static_cast<int64_t>(gain.size());
      for (int64_t row = 0; row < kRows; ++row) {
        double* x = expected.data() + row * kWidth + first;
        double squares = 0;
        for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
        const double rstd = 1 / std::sqrt(squares / static_cast<double>(n) + kEpsilon);
        for (int64_t i = 0; i < n; ++i) x[i] *= rstd * (offset + gain[static_cast<size_t>(i)]);
      }
    };
    if (per_head) {
      for (int64_t head = 0; head < kHeads; ++head) normalize(head * kDim, gamma_q);
      for (int64_t head = 0; head < kGroups; ++head) normalize((kHeads + head) * kDim, gamma_k);
    } else {
      normalize(0, gamma_q);
      normalize(kHeads * kDim, gamma_k);
    }
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t head = 0; head < kHeads + kGroups; ++head) {
        double* x = expected.data() + row * kWidth + head * kDim;
        for (int64_t i = 0; i < kRotary / 2; ++i) {
          const double angle = static_cast<double>(row % kSequence) *
                               std::pow(kBase, -2.0 * static_cast<double>(i) / kRotary);
          const double low = x[i];
          const double high = x[i + kRotary / 2];
          x[i] = low * std::cos(angle) - high * std::sin(angle);
          x[i + kRotary / 2] = high * std::cos(angle) + low * std::sin(angle);
        }
      }
    }
    expect_near(results[0], expected, per_head ? "per head" : "projection");
  }
}

}  // namespace
}  // namespace troupe::testing
