// How the products of experts are launched on a GPU: by the rows that are expected, not by those
// that their buffers have room for.
#include <gtest/gtest.h>
#include <memory>

#include "cuda/gpu.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "runtime/device_memory.h"

namespace troupe::testing {
namespace {

// The kernel, on the GPU at hand, for groups of 8 experts with weights [128, 128].
KernelChoice kernel_for(const OpSpec& spec, int64_t bound, int64_t expected) {
  Program program(std::make_shared<const StateTable>());
  Builder builder(program);
  const ValueId offsets = builder.input("offsets", DType::i32, {9});
  const ValueId weight = builder.input("weight", DType::bf16, {8, 128, 128});
  const ValueId rows = program.add_value({.name = "rows",
                                          .dtype = DType::bf16,
                                          .shape = {bound, 128},
                                          .role = Role::input,
                                          .rows = {offsets, 8, expected}});
  builder.emit(spec, Attributes(NoAttributes{}), {rows, weight, offsets}, "y");
  return spec.cuda(OpView{program, program.op(0)}, device_traits(0));
}

// Experts on eight ranks: a buffer has room for the tokens of all of them, an eighth of which come.
// Blocks work in pairs where an expert has 256 rows and more.
TEST(GroupedLinearKernels, AreChosenByTheRowsThatAreExpected) {
  TROUPE_NEED_GPU();
  if (device_traits(0).major() != 9) GTEST_SKIP() << "the kernels are Hopper's";
  for (const OpSpec* spec : {&kGroupedLinear, &kGroupedLinearDataGradient}) {
    SCOPED_TRACE(spec->name);
    const KernelChoice few = kernel_for(*spec, 8 * 128, 8 * 128);
    const KernelChoice many = kernel_for(*spec, 8 * 2048, 8 * 2048);
    EXPECT_STREQ(few.variant, "sm90");
    EXPECT_STREQ(many.variant, "sm90 pair");
    ASSERT_NE(few.function, many.function);
    EXPECT_EQ(kernel_for(*spec, 8 * 4096, 8 * 128).function, few.function);
    EXPECT_EQ(kernel_for(*spec, 8 * 4096, 8 * 2048).function, many.function);
    EXPECT_EQ(kernel_for(*spec, 8 * 4096, 0).function, many.function)
        << "all rows of the buffer are expected";
  }
}

}  // namespace
}  // namespace troupe::testing
