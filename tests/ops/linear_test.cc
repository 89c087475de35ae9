// The linear map's bias, against sums written out: one output column, and a main gradient that
// several uses of the bias add up in. (The generic tests run without main gradients.)
#include "ops/products/linear/linear.h"

#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "support/main_gradient.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

TEST(Linear, OneOutputWithBias) {
  const std::vector<double> x = {1, 2, 3, -4, 5, 0.5};
  for (const bool wide : {false, true}) {
    const OpSample sample{
        "", [&](SampleBuilder& builder) {
          const ValueId rows = builder.values("x", {3, 2}, x, {});
          const ValueId weight = builder.values("weight", {1, 2}, {2, -1}, {});
          const ValueId bias = builder.values("bias", {1}, {0.25}, {});
          builder.result(linear(
              builder.builder(), rows, weight,
              {.bias = bias, .output = wide ? LinearOutput::accumulation : LinearOutput::compute},
              "y"));
        }};
    // All of these numbers are exact in bf16.
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      SampleRun run(sample, {.dtype = dtype, .backward = false});
      run.run();
      EXPECT_EQ(run.results()[0], (std::vector<double>{0.25, 10.25, 9.75})) << name_of(dtype);
    }
  }
}

// Each of the two results gives the bias the column sums of 1, 2, 3, ... laid out in rows.
TEST(Linear, BiasGradientsAddUpInTheMainGradient) {
  for (const int64_t outputs : {1, 3}) {
    for (const int64_t rows : {1, 4, 1100}) {
      const auto gradient = main_gradient(
          {outputs}, std::vector<double>(static_cast<size_t>(outputs), 0.5),
          [&](SampleBuilder& sample, ValueId bias) {
            const ValueId weight = sample.tensor("weight", {outputs, 2});
            for (const char* name : {"first", "second"}) {
              const ValueId x = sample.tensor("x", {rows, 2});
              sample.result(linear(sample.builder(), x, weight,
                                   {.bias = bias, .output = LinearOutput::accumulation}, name));
            }
          });
      for (int64_t n = 0; n < outputs; ++n) {
        double sum = 0;
        for (int64_t t = 0; t < rows; ++t) sum += static_cast<double>(t * outputs + n + 1);
        EXPECT_EQ(gradient[static_cast<size_t>(n)], 2 * sum) << outputs << " x " << rows;
      }
    }
  }
}

TEST(LinearDeathTest, RefusesABiasOfAnotherLengthOrType) {
  Program program(std::make_shared<const StateTable>());
  Builder builder(program);
  const ValueId x = builder.input("x", DType::f32, {4, 2});
  const ValueId weight = builder.input("weight", DType::f32, {3, 2});
  const ValueId longer = builder.input("longer", DType::f32, {4});
  const ValueId wider = builder.input("wider", DType::f64, {3});
  EXPECT_DEATH(linear(builder, x, weight, {.bias = longer}, "y"), "linear: bias");
  EXPECT_DEATH(linear(builder, x, weight, {.bias = wider}, "y"), "linear: bias");
}

}  // namespace
}  // namespace troupe::testing
