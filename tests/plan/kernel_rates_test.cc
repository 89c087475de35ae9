// The shares of a GPU's limits by which operations are timed: to which kernels and shapes they
// belong. What they are is measured (docs/benchmarks/plan_time.md).
#include "plan/kernel_rates.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <string_view>

#include "ops/registry.h"
#include "plan/memory_shares.h"
#include "plan/plan_test_support.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

TEST(MemoryShares, BelongToOperationsThatThereAre) {
  std::string_view before;
  for (const KernelShare& kernel : kMemoryShares) {
    const auto operations = all_operations();
    EXPECT_TRUE(std::any_of(operations.begin(), operations.end(), [&](const OpSpec* spec) {
      return kernel.kind == spec->name;
    })) << kernel.kind;
    EXPECT_LT(before, kernel.kind) << "in the order of the alphabet, each once";
    EXPECT_GT(kernel.share, 0) << kernel.kind;
    EXPECT_LT(kernel.share, 1.2) << kernel.kind;
    before = kernel.kind;
  }
}

// A GPU that only its products limit.
GpuModel gpu_of_slow_products() {
  GpuModel gpu;
  gpu.traits = {.compute_capability = 90, .multiprocessors = 132};
  gpu.bf16_flops = gpu.f32_flops = 1e9;
  gpu.memory_bandwidth = gpu.host_bandwidth = 1e18;
  return gpu;
}

// Seconds of all operations of a kind, on a GPU that only its products limit, beside what each
// kernel takes until it runs.
double seconds_of_products(const std::string& flags, std::string_view kind,
                           double attention_scale = 1) {
  const std::unique_ptr<Program> program = testing::program_of(
      "--model mixtral-tiny --max-position-embeddings 4096 --bf16 --gpus 1xh100 " + flags);
  GpuModel gpu = gpu_of_slow_products();
  gpu.attention_scale = attention_scale;
  double seconds = 0;
  for (int32_t i = 0; i < program->op_count(); ++i) {
    if (program->op(i).spec->name == kind) seconds += seconds_of(*program, *program, i, gpu);
  }
  EXPECT_GT(seconds, 0) << kind;
  return seconds;
}

constexpr double kTolerance = 1e-5;  // 1.5 us of each kernel beside a second and more

TEST(KernelRates, OfAttentionGrowWithTheKeysOfAQuery) {
  // Of 4 times as many keys in all a query has twice as many: k of them reach k / (k + 430) of the
  // most, in the gradient k / (k + 380).
  const double k = 512 / 2.0;
  const auto ratio = [](std::string_view kind) {
    return seconds_of_products("--seq-length 1024", kind) /
           seconds_of_products("--seq-length 512", kind);
  };
  EXPECT_NEAR(ratio("attention"), 4 * (2 * k + 430) / (2 * (k + 430)), 2e-3);
  EXPECT_NEAR(ratio("attention_gradient"), 4 * (2 * k + 380) / (2 * (k + 380)), 2e-3);
}

TEST(KernelRates, OfAttentionAreScaledByWhatAMachineMeasured) {
  for (const auto kind : {"attention", "attention_gradient"}) {
    EXPECT_NEAR(seconds_of_products("", kind, 0.5) / seconds_of_products("", kind), 2, kTolerance);
  }
  EXPECT_EQ(seconds_of_products("", "linear", 0.5), seconds_of_products("", "linear"));
}

TEST(KernelRates, OfAttentionAreThoseOfTheSizeOfItsHeads) {
  const auto ratio = [](std::string_view kind, const std::string& size) {
    const std::string flags = "--seq-length 512 --kv-channels ";
    return seconds_of_products(flags + size, kind) / seconds_of_products(flags + "128", kind);
  };
  EXPECT_NEAR(ratio("attention", "64"), std::sqrt(2) / 2, kTolerance) << "half the flops";
  EXPECT_NEAR(ratio("attention_gradient", "64"), std::sqrt(2) / 2, kTolerance);
  EXPECT_NEAR(ratio("attention", "256"), 2, kTolerance);
  EXPECT_NEAR(ratio("attention_gradient", "256"), 2 / 0.72, kTolerance);
}

// A GPU that only its link to the host limits.
double seconds_of_host(const std::string& flags, std::string_view kind, double bandwidth) {
  const std::unique_ptr<Program> program =
      testing::program_of("--model mixtral-tiny --seq-length 64 --bf16 --gpus 1xh100 " + flags);
  GpuModel gpu;
  gpu.traits = {.compute_capability = 90, .multiprocessors = 132};
  gpu.bf16_flops = gpu.f32_flops = gpu.memory_bandwidth = 1e18;
  gpu.host_bandwidth = bandwidth;
  double seconds = 0;
  double bytes = 0;
  for (int32_t i = 0; i < program->op_count(); ++i) {
    const Op& op = program->op(i);
    if (op.spec->name != kind) continue;
    seconds += seconds_of(*program, *program, i, gpu);
    for (const ValueId id : program->outputs(op)) {
      const Value& value = program->value(id);
      const bool is_there = value.role == Role::offloaded ||
                            (value.state.valid() && program->state()[value.state].on_host);
      if (is_there) bytes += static_cast<double>(value.bytes());
    }
  }
  EXPECT_GT(bytes, 0) << kind;
  return seconds / (bytes / bandwidth);
}

TEST(KernelRates, OfUpdatesOnTheHostAreLessThanThoseOfCopies) {
  EXPECT_NEAR(seconds_of_host("--optimizer-cpu-offload", "adamw", 1e3), 1 / 0.77, kTolerance);
  EXPECT_NEAR(seconds_of_host("--fine-grained-activation-offloading --offload-modules expert_fc1 "
                              "--min-offloaded-tensor-size 1",
                              "offload", 1e3),
              1, kTolerance);
}

TEST(KernelRates, OfExpertsDependOnTheirTiles) {
  // 256 and more rows of an expert. Of results of 192 columns a tile of 256 is three quarters full;
  // a sum over d products reaches d / (d + 140) of the rate.
  const auto seconds = [](int inner) {
    return seconds_of_products(
        "--seq-length 2048 --hidden-size 512 --moe-ffn-hidden-size " + std::to_string(inner),
        "grouped_linear");
  };
  // Two products: 512 to 2 x inner columns, and inner to 512. For each row of either, in products
  // at the full rate:
  const auto expected = [](double inner, double filled) {
    return 2 * inner * (512 + 140) / filled + 512 * (inner + 140);
  };
  EXPECT_NEAR(seconds(96) / seconds(128), expected(96, 0.75) / expected(128, 1), kTolerance);
}

TEST(KernelRates, OfExpertsAreThoseOfTheMultiprocessorsThatTheyTake) {
  const std::unique_ptr<Program> program = testing::program_of(
      "--model mixtral-tiny --seq-length 512 --hidden-size 512 --moe-ffn-hidden-size 256 --bf16 "
      "--gpus 1xh100");
  const GpuModel gpu = gpu_of_slow_products();
  int32_t products = 0;
  for (int32_t i = 0; i < program->op_count(); ++i) {
    const std::string_view kind = program->op(i).spec->name;
    if (kind != "linear" && !kind.starts_with("grouped_linear")) continue;
    const double with_all = seconds_of(*program, *program, i, gpu);
    program->set_multiprocessors(i, {.count = 22, .spares = true});
    const bool keeps = kind != "linear";
    EXPECT_NEAR(seconds_of(*program, *program, i, gpu) / with_all, keeps ? 132.0 / 110 : 1,
                kTolerance)
        << kind;
    EXPECT_EQ(leaves_multiprocessors({*program, program->op(i)}, gpu.traits), keeps) << kind;
    products += keeps ? 1 : 0;
  }
  EXPECT_GT(products, 0);
}

}  // namespace
}  // namespace troupe
