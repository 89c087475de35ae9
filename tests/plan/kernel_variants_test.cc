// Which kernels a step's operations get on a GPU, as people are told.
#include "plan/kernel_variants.h"

#include <gtest/gtest.h>
#include <memory>

#include "ops/products/linear/linear.h"
#include "program/builder.h"

namespace troupe {
namespace {

// Three products, one of them with f64 logits, and two sums of biases.
std::unique_ptr<Program> make_program() {
  auto program = std::make_unique<Program>(std::make_shared<const StateTable>());
  Builder builder(*program);
  const ValueId x = builder.input("x", DType::bf16, {32, 64});
  const ValueId weight = builder.input("weight", DType::bf16, {16, 64});
  linear(builder, x, weight, {}, "y");
  linear(builder, x, weight, {.bias = {}, .output = LinearOutput::f64}, "logits");
  linear(builder, x, weight, {}, "z");
  const LinearBiasGradientAttributes attributes{.bias_dtype = DType::bf16};
  for (const int64_t columns : {64, 63}) {
    const ValueId dy = builder.input("dy", DType::bf16, {32, columns});
    builder.emit(kLinearBiasGradient, Attributes(attributes), {dy, ValueId{}}, "db");
  }
  return program;
}

TEST(KernelVariants, AreCountedByKind) {
  const auto program = make_program();
  std::vector<KernelVariant> variants = kernel_variants(*program, {});
  ASSERT_EQ(variants.size(), 4U);
  EXPECT_EQ(variants[0].kind, "linear");
  EXPECT_EQ(variants[0].variant, "cublaslt");
  EXPECT_EQ(variants[0].operations, 2);
  EXPECT_EQ(variants[1].variant, "plain tiles");
  EXPECT_EQ(variants[1].slow, SlowKernel::mixed_dtypes);
  EXPECT_EQ(text_of(variants),
            "  linear                            cublaslt 2, plain tiles 1\n"
            "  linear_bias_gradient              packs 1, elements 1\n");
  add_variants(variants, kernel_variants(*program, {}));
  ASSERT_EQ(variants.size(), 4U);
  EXPECT_EQ(variants[0].operations, 4);
}

TEST(KernelVariants, AreNamedByOperation) {
  const auto program = make_program();
  EXPECT_EQ(variants_of_operations(*program, {}),
            (std::vector<std::string>{"cublaslt", "plain tiles", "cublaslt", "packs", "elements"}));
}

}  // namespace
}  // namespace troupe
