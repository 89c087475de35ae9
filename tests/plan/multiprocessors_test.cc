// Multiprocessors that products leave to the exchanges beside them: which operations the pass
// finds, and what plans make of it.
#include <gtest/gtest.h>
#include <set>
#include <string>

#include "passes/overlap.h"
#include "plan/exposure.h"
#include "plan/kernel_variants.h"
#include "plan/plan_test_support.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

constexpr DeviceTraits kHopper{.compute_capability = 90, .multiprocessors = 132};
const std::string kExperts =
    "--model mixtral-tiny --num-layers 2 --seq-length 128 --global-batch-size 8 --ranks 4 "
    "--expert-model-parallel-size 4 --hidden-size 128 --moe-ffn-hidden-size 128 --bf16 "
    "--delay-wgrad-compute ";

TEST(Multiprocessors, AreReservedForExchangesByProductsBesideThem) {
  for (const char* dispatcher : {"allgather", "alltoall", "flex"}) {
    SCOPED_TRACE(dispatcher);
    const std::string flags = kExperts + "--moe-token-dispatcher-type " + dispatcher;
    const auto program = testing::program_of(flags + " --moe-flex-dispatcher-num-sms 20");
    std::set<int32_t> beside;
    for (int32_t i = 0; i < program->op_count(); ++i) {
      if (!is_expert_exchange(program->op(i))) continue;
      for (const int32_t other : operations_beside(*program, i)) beside.insert(other);
    }
    int32_t products = 0;
    for (int32_t i = 0; i < program->op_count(); ++i) {
      const Op& op = program->op(i);
      const bool is_product = product_flops_of(*program, op) > 0;
      const bool leaves = is_product && beside.contains(i);
      const bool exchanges = is_expert_exchange(op);
      EXPECT_EQ(op.multiprocessors.count, leaves || exchanges ? 20 : 0) << op.spec->name;
      EXPECT_EQ(op.multiprocessors.spares, leaves) << op.spec->name;
      products += leaves ? 1 : 0;
    }
    EXPECT_GT(products, 0);
    EXPECT_GT(measure_exposure(*program).covered, 0);

    // Without the flag it is the same program, in which each takes all.
    const auto plain = testing::program_of(flags);
    ASSERT_EQ(plain->op_count(), program->op_count());
    for (int32_t i = 0; i < plain->op_count(); ++i) {
      EXPECT_EQ(plain->op(i).spec, program->op(i).spec);
      EXPECT_EQ(plain->op(i).multiprocessors.count, 0);
    }
  }
}

TEST(Multiprocessors, AreSkippedLikeEveryPass) {
  const auto program = testing::program_of(
      kExperts + "--moe-flex-dispatcher-num-sms 20 --skip-passes multiprocessors");
  for (int32_t i = 0; i < program->op_count(); ++i) {
    EXPECT_EQ(program->op(i).multiprocessors.count, 0);
  }
}

// Persistent kernels and exchanges keep to it; attention, dense products and all others take what
// they take without.
TEST(Multiprocessors, AreShownWithTheKernelsThatKeepToThem) {
  const auto program = testing::program_of(kExperts + "--moe-flex-dispatcher-num-sms 20");
  const std::vector<KernelVariant> variants = kernel_variants(*program, kHopper);
  int32_t leaving = 0;
  for (const KernelVariant& variant : variants) {
    if (variant.multiprocessors == 112) {
      ++leaving;
      EXPECT_TRUE(variant.kind.starts_with("grouped_linear")) << variant.kind;
      EXPECT_TRUE(variant.name().ends_with(" on 112 multiprocessors")) << variant.name();
    } else {
      EXPECT_TRUE(variant.multiprocessors == 0 || variant.multiprocessors == 20) << variant.kind;
    }
  }
  EXPECT_GT(leaving, 0);
  EXPECT_NE(text_of(variants).find(" on 20 multiprocessors"), std::string::npos);
}

}  // namespace
}  // namespace troupe
