// Accumulation: the factor's precision. (The generic tests have f64 itself as their measure.)
#include "ops/optimizer/accumulate/accumulate.h"

#include <gtest/gtest.h>
#include <vector>

#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

TEST(Accumulate, TakesAFactorInDoublePrecision) {
  // fp32 rounds it to 1.
  constexpr double kFactor = 1 + 0x1p-40;
  const auto results = run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.accumulation = true;
    constant.differentiable = false;
    const ValueId target = sample.builder().metric("total", DType::f64, {2});
    const ValueId source = sample.values("source", {2}, {1, -4}, constant);
    const ValueId factor = sample.values("factor", {1}, {kFactor}, constant);
    accumulate(sample.builder(), target, source, 1.0, /*overwrite=*/true, factor);
    sample.result_without_gradient(target);
  });
  EXPECT_EQ(results.at(0), (std::vector<double>{kFactor, -4 * kFactor}));
}

}  // namespace
}  // namespace troupe::testing
