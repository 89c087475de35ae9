// Weight gradients in bf16 on a GPU: the CPU's, up to the order of sums.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "cuda/gpu.h"
#include "support/weight_gradients.h"

namespace troupe::testing {
namespace {

class CudaWeightGradient : public ::testing::TestWithParam<GradientCase> {};

// Sums of up to 9000 products of normals in f32, in another order, differ by 1e-4 of the largest at
// most, so one rounding to bf16 may fall to the other side. Then the results are neighbours in
// bf16, which has 8 bits of precision: 2^-7 of the element apart at most.
TEST_P(CudaWeightGradient, InBf16IsThatOfTheCpu) {
  TROUPE_NEED_GPU();
  for (const bool accumulate : {false, true}) {
    SCOPED_TRACE(accumulate ? "added" : "stored");
    const std::vector<float> expected = run_gradient(GetParam(), DType::bf16, accumulate, 2);
    const std::vector<float> found =
        run_gradient(GetParam(), DType::bf16, accumulate, 2, Device::cuda);
    ASSERT_EQ(found.size(), expected.size());
    float largest = 0;
    for (const float value : expected) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i], 0x1p-7F * std::abs(expected[i]) + 1e-4F * largest) << i;
    }
    EXPECT_EQ(run_gradient(GetParam(), DType::bf16, accumulate, 2, Device::cuda), found);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, CudaWeightGradient, ::testing::ValuesIn(gradient_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
