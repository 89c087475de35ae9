#include "train/slow_kernels.h"

#include <array>
#include <gtest/gtest.h>
#include <memory>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "program/builder.h"

namespace troupe {
namespace {

TEST(SlowKernels, AreWarnedOfOnce) {
  const std::vector<KernelVariant> variants = {
      {.kind = "linear", .variant = "cublaslt", .operations = 9},
      {.kind = "attention", .variant = "plain tiles", .slow = SlowKernel::dropout, .operations = 4},
      {.kind = "attention_gradient",
       .variant = "plain tiles",
       .slow = SlowKernel::dropout,
       .operations = 4},
      {.kind = "grouped_linear",
       .variant = "plain tiles",
       .slow = SlowKernel::compute_capability,
       .operations = 8}};
  const auto warnings = warn_of_slow_kernels(variants, {.compute_capability = 80});
  ASSERT_EQ(warnings.size(), 2U);
  EXPECT_EQ(warnings[0],
            "Warning: slow kernels without tensor cores (plain tiles) for attention, "
            "attention_gradient: the fast kernels have no dropout. Use "
            "--attention-dropout 0 to get fast ones.");
  EXPECT_NE(warnings[1].find("for grouped_linear: the fast kernel is for compute capability 9.0, "
                             "and this GPU has 8.0."),
            std::string::npos)
      << warnings[1];
}

TEST(SlowKernels, HaveAdviceForEveryReason) {
  for (int reason = 1; reason <= static_cast<int>(SlowKernel::compute_capability); ++reason) {
    const KernelVariant variant{
        .kind = "a", .variant = "b", .slow = static_cast<SlowKernel>(reason), .operations = 1};
    const auto warnings = warn_of_slow_kernels({&variant, 1}, {});
    ASSERT_EQ(warnings.size(), 1U);
    EXPECT_EQ(warnings[0].find("Warning: "), 0U);
  }
  EXPECT_TRUE(warn_of_slow_kernels({}, {}).empty());
}

TEST(SlowKernels, AreThoseOfProductsWithoutAnAlgorithm) {
  Program program(std::make_shared<StateTable>());
  Builder builder(program);
  const ValueId a = fill(builder, 1, DType::f32, {2}, "a");
  const ValueId b = fill(builder, 2, DType::f32, {2}, "b");
  add(builder, a, b, "c");
  constexpr std::array kOperations = {0, 1, 2};
  EXPECT_EQ(
      warn_of_missing_algorithms(program, kOperations),
      "Warning: slow kernels without tensor cores for 1 add, 2 fill: on this GPU cuBLASLt has "
      "no algorithm for their sizes. Choose multiples of 8 for the sizes of the model to get "
      "fast ones.");
  EXPECT_EQ(warn_of_missing_algorithms(program, {}), "");
}

}  // namespace
}  // namespace troupe
