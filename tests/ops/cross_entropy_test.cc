// The loss of a vocabulary in parts, of logits whose exponentials are too large to be numbers.
#include "ops/losses/cross_entropy/cross_entropy.h"

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

// One token, whose label is the first id, with one logit in each part.
double loss_of_parts(const std::vector<double>& logits) {
  std::vector<double> parts;
  for (size_t i = 0; i < logits.size(); ++i) {
    parts.insert(parts.end(), {logits[i], 1, i == 0 ? logits[i] : 0});
  }
  return run_sample([&](SampleBuilder& sample) {
    const SampleBuilder::Options constant{.differentiable = false, .accumulation = true};
    const CrossEntropyInputs inputs{.logits = sample.values("logits", {1, 1}, {logits[0]}, {}),
                                    .labels = sample.integers("labels", {1}, {0}),
                                    .mask = sample.values("mask", {1}, {1}, constant),
                                    .tokens = {}};
    const auto rows = static_cast<int64_t>(logits.size());
    const ValueId all = sample.values("parts", {rows, 3}, parts, constant);
    sample.result(cross_entropy_of_parts(sample.builder(), inputs, all, "loss").loss);
  })[0][0];
}

// exp(1000) is no number: the differences from the largest logit of all parts are taken.
TEST(CrossEntropyOfParts, IsFiniteWhicheverPartHasTheLargestLogit) {
  EXPECT_NEAR(loss_of_parts({0, 0, 0}), std::log(3), 1e-12);
  EXPECT_EQ(loss_of_parts({1000, 0, 0}), 0);
  EXPECT_EQ(loss_of_parts({0, 1000, 0}), 1000);
  EXPECT_EQ(loss_of_parts({0, 0, 1000}), 1000);
}

}  // namespace
}  // namespace troupe::testing
