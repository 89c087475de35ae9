// Gated rows against a plain computation in double.
#include "ops/elementwise/row_gate/row_gate.h"

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "support/sample_run.h"

namespace troupe::testing {
namespace {

TEST(RowGate, AgreesWithTheFormulas) {
  constexpr int64_t kTokens = 9;
  constexpr int64_t kHidden = 133;
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const ValueId x = builder.tensor("x", {kTokens, kHidden});
        const ValueId dy = builder.tensor("dy", {kTokens, kHidden});
        const ValueId gate =
            builder.tensor("gate", {kTokens, 1}, {.deviation = 4, .accumulation = true});
        builder.result(row_gate(builder.builder(), x, gate, "y"));
        for (const ValueId gradient : builder.builder().emit(
                 kRowGateGradient, Attributes(NoAttributes()), {x, dy, gate}, "d_x")) {
          builder.result(gradient);
        }
      }};
  // Three roundings of numbers up to 4, and a sum of 133 products; bf16 results have 8 bits.
  struct Accuracy {
    DType dtype;
    double element;
    double sum;
  };
  for (const Accuracy& accuracy :
       {Accuracy{DType::f64, 1e-14, 1e-12}, Accuracy{DType::f32, 2e-6, 2e-5},
        Accuracy{DType::bf16, 8e-3, 2e-4}}) {
    SampleRun run(sample, {.dtype = accuracy.dtype, .backward = false, .rounded_to = DType::bf16});
    run.run();
    const auto results = run.results();
    const auto number = [&](size_t input, size_t i) {
      return static_cast<double>(static_cast<float>(bf16(run.inputs()[input].data[i])));
    };
    for (size_t t = 0; t < kTokens; ++t) {
      const double s = 1 / (1 + std::exp(-number(2, t)));
      double sum = 0;
      for (size_t i = t * kHidden; i < (t + 1) * kHidden; ++i) {
        sum += number(0, i) * number(1, i);
        ASSERT_NEAR(results[0][i], s * number(0, i), accuracy.element) << name_of(accuracy.dtype);
        ASSERT_NEAR(results[1][i], s * number(1, i), accuracy.element) << name_of(accuracy.dtype);
      }
      ASSERT_NEAR(results[2][t], s * (1 - s) * sum, accuracy.sum) << name_of(accuracy.dtype);
    }
  }
}

}  // namespace
}  // namespace troupe::testing
