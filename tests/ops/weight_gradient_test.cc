// Weight gradients in bf16: what is stored, or added to what is there, is what f32 would hold,
// rounded once.
#include <gtest/gtest.h>
#include <vector>

#include "support/weight_gradients.h"

namespace troupe::testing {
namespace {

class WeightGradient : public ::testing::TestWithParam<GradientCase> {};

TEST_P(WeightGradient, InBf16IsRoundedOnce) {
  for (const bool accumulate : {false, true}) {
    SCOPED_TRACE(accumulate ? "added" : "stored");
    const std::vector<float> wide = run_gradient(GetParam(), DType::f32, accumulate, 2);
    const std::vector<float> narrow = run_gradient(GetParam(), DType::bf16, accumulate, 2);
    ASSERT_EQ(wide.size(), narrow.size());
    for (size_t i = 0; i < wide.size(); ++i) {
      ASSERT_EQ(narrow[i], static_cast<float>(bf16(wide[i]))) << i << " of " << wide[i];
    }
    EXPECT_EQ(run_gradient(GetParam(), DType::bf16, accumulate, 3), narrow)
        << "threads change no bit";
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, WeightGradient, ::testing::ValuesIn(gradient_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
