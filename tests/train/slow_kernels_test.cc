// Warnings of slow kernels, whole: for each reason what is wrong and what to change.
#include "train/slow_kernels.h"

#include <array>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "plan/gpu_cluster.h"
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
  const auto warnings_of = [](SlowKernel reason, int32_t capability) {
    const KernelVariant variant{.kind = "a", .variant = "b", .slow = reason, .operations = 1};
    return warn_of_slow_kernels({&variant, 1}, {.compute_capability = capability});
  };
  const std::map<SlowKernel, std::string> advice = {
      {SlowKernel::dtype, "the fast kernels are for bf16. Use --bf16"},
      {SlowKernel::mixed_dtypes,
       "cuBLASLt does not combine these dtypes. Use --moe-router-dtype fp32"},
      {SlowKernel::bias_dtype,
       "cuBLASLt adds no bias of this dtype to this result. Use --disable-bias-linear or --bf16"},
      {SlowKernel::head_size,
       "the fast kernels take heads of 8, 16, ... 256 elements. Choose such --kv-channels"},
      {SlowKernel::dropout, "the fast kernels have no dropout. Use --attention-dropout 0"},
      {SlowKernel::documents,
       "within documents the fast kernels take keys of up to 192 elements and values of up to 128. "
       "Leave --reset-attention-mask out"},
      {SlowKernel::one_query,
       "a rank has a single query of a chunk. Use a longer --seq-length or a smaller "
       "--context-parallel-size"},
      {SlowKernel::row_bytes,
       "tensor cores are fed with rows of a multiple of 16 bytes. Choose multiples of 8 for "
       "--hidden-size, and for --moe-ffn-hidden-size over --expert-tensor-parallel-size"},
      {SlowKernel::row_codes,
       "tensor cores are fed with rows of a multiple of 16 codes. Choose multiples of 16 for "
       "--hidden-size and for the other sizes of products"},
      {SlowKernel::block_scales,
       "this GPU multiplies codes with one scale for each tensor or for each 128 numbers. Use "
       "--fp8-recipe tensorwise or blockwise"},
      {SlowKernel::four_bits,
       "this GPU has no products in 4 bits, and they are computed in fp32. Use --fp8-format"},
      {SlowKernel::compute_capability,
       "the fast kernel is for compute capability 9.0, and this GPU has 12.1. Use a Hopper GPU"}};
  EXPECT_EQ(static_cast<size_t>(SlowKernel::compute_capability), advice.size())
      << "all reasons are here";
  for (const auto& [reason, text] : advice) {
    const std::string kernels = reason == SlowKernel::block_scales
                                    ? "kernels no faster than those of bf16"
                                    : "slow kernels without tensor cores";
    EXPECT_EQ(warnings_of(reason, 121),
              std::vector{"Warning: " + kernels + " (b) for a: " + text + " to get fast ones."});
  }
  EXPECT_TRUE(warnings_of(SlowKernel::no, 121).empty());
  EXPECT_TRUE(warnings_of(SlowKernel::dropout, kNoGpu).empty()) << "a CPU has no kernels to choose";
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
  EXPECT_TRUE(warn_of_slow_kernels(program, Device::cpu, 0).empty());
}

}  // namespace
}  // namespace troupe
