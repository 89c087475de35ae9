// Matrix products beyond the size of samples: several tiles, panels and pieces of a reduction,
// accumulation into a target, bias, every dtype; against plain loops in double.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "ops/cpu/gemm.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/products/linear/linear.h"
#include "support/guarded_op.h"

namespace troupe {
namespace {

// Values k/16 with |k| <= 24: exact in bf16, and so are all float sums of fewer than 2^13 products.
template <class T>
std::vector<T> exact_values(int64_t count, uint32_t seed) {
  std::vector<T> values(static_cast<size_t>(count));
  uint32_t state = seed * 2654435761U + 1;
  for (T& value : values) {
    state = state * 1664525U + 1013904223U;
    value = T(static_cast<float>(static_cast<int>((state >> 16) % 49) - 24) / 16.0F);
  }
  return values;
}

struct ProductCase {
  int64_t m, n, k;
  bool trans_a, trans_b, accumulate, bias;
  bool split = false;
};

// All sums are exact, so the result must be the exact product, rounded once.
template <class A, class B, class C>
void check_product(const ProductCase& p, int threads) {
  using Sum = gemm_sum_t<A, B, C>;
  SCOPED_TRACE(std::to_string(p.m) + "x" + std::to_string(p.n) + "x" + std::to_string(p.k));
  const auto a = exact_values<A>(p.m * p.k, 1);
  const auto b = exact_values<B>(p.k * p.n, 2);
  const auto bias = exact_values<B>(p.n, 3);
  auto c = exact_values<C>(p.m * p.n, 4);
  const auto before = c;
  if (!p.accumulate) std::fill(c.begin(), c.end(), C(std::numeric_limits<float>::quiet_NaN()));

  const GemmTiles tiles = gemm_tiles(p.m, p.n, p.k, 1, p.split);
  EXPECT_EQ(tiles.reductions > 1, p.split);
  ThreadPool pool(threads);
  KernelArguments args;
  args.pool = &pool;
  args.scratch_bytes_per_thread =
      (gemm_scratch_bytes(tiles, dtype_of<A>, dtype_of<B>, dtype_of<C>) + 63) / 64 * 64;
  std::vector<std::byte> scratch(args.scratch_bytes_per_thread * static_cast<size_t>(threads) + 64);
  std::vector<double> workspace(gemm_workspace_bytes(tiles, p.m, p.n, dtype_of<Sum>) / 8 + 1);
  args.scratch = scratch.data();
  args.workspace = reinterpret_cast<std::byte*>(workspace.data());
  const GemmOperand<A> left{a.data(), p.trans_a ? p.m : p.k, p.trans_a};
  const GemmOperand<B> right{b.data(), p.trans_b ? p.k : p.n, p.trans_b};
  parallel_gemm<A, B, C>(args, tiles, left, right, p.m, p.n, p.k, c.data(), p.n, p.accumulate,
                         p.bias ? bias.data() : nullptr);

  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      if ((i * 7 + j) % 11 != 0) continue;
      double sum = p.accumulate ? static_cast<double>(before[static_cast<size_t>(i * p.n + j)]) : 0;
      if (p.bias) sum += static_cast<double>(bias[static_cast<size_t>(j)]);
      for (int64_t q = 0; q < p.k; ++q) {
        sum += static_cast<double>(*left.block(i, q).data) *
               static_cast<double>(*right.block(q, j).data);
      }
      ASSERT_EQ(static_cast<double>(c[static_cast<size_t>(i * p.n + j)]),
                static_cast<double>(C(static_cast<Sum>(sum))))
          << i << ", " << j;
    }
  }
}

TEST(ParallelGemm, IsExactOnExactNumbers) {
  for (const int threads : {1, 3}) {
    for (const bool trans_a : {false, true}) {
      for (const bool trans_b : {false, true}) {
        const ProductCase tiles{600, 530, 70, trans_a, trans_b, false, true};
        check_product<double, double, double>(tiles, threads);
        check_product<float, float, float>(tiles, threads);
        check_product<bf16, bf16, bf16>(tiles, threads);
        check_product<bf16, bf16, float>(tiles, threads);
        check_product<float, bf16, bf16>(tiles, threads);
        check_product<float, float, double>(tiles, threads);
        check_product<bf16, bf16, double>(tiles, threads);
        const ProductCase panels{150, 131, 1100, trans_a, trans_b, false, false};
        check_product<float, float, float>(panels, threads);
        check_product<bf16, bf16, bf16>(panels, threads);
        check_product<float, bf16, float>(panels, threads);
        check_product<bf16, bf16, double>(panels, threads);
        check_product<double, float, float>(panels, threads);
        check_product<double, bf16, bf16>(panels, threads);
        const ProductCase accumulated{33, 47, 600, trans_a, trans_b, true, false};
        check_product<double, double, double>(accumulated, threads);
        check_product<bf16, bf16, float>(accumulated, threads);
        check_product<double, bf16, float>(accumulated, threads);
        for (const bool accumulate : {false, true}) {
          const ProductCase split{21, 37, 5003, trans_a, trans_b, accumulate, false, true};
          check_product<double, double, double>(split, threads);
          check_product<float, float, float>(split, threads);
          check_product<bf16, bf16, float>(split, threads);
          check_product<double, float, float>(split, threads);
        }
      }
    }
  }
}

TEST(GemmTile, HandlesEmptyExtents) {
  std::vector<float> c{1, 2, std::numeric_limits<float>::quiet_NaN(), 4};
  gemm_tile<float>(false, false, 2, 2, 0, 1, nullptr, 1, nullptr, 1, 0, c.data(), 2);
  EXPECT_EQ(c, (std::vector<float>{0, 0, 0, 0}));
  c = {1, 2, 3, 4};
  gemm_tile<float>(false, false, 2, 2, 0, 1, nullptr, 1, nullptr, 1, 1, c.data(), 2);
  EXPECT_EQ(c, (std::vector<float>{1, 2, 3, 4}));
  gemm_tile<float>(false, false, 0, 2, 3, 1, nullptr, 3, nullptr, 2, 0, c.data(), 2);
  EXPECT_EQ(c, (std::vector<float>{1, 2, 3, 4}));
}

// beta = 0 must overwrite NaN, for every size of BLAS's own special cases.
TEST(GemmTile, OverwritesWithoutReading) {
  for (const int64_t size : {1, 2, 3, 16, 17, 64, 200}) {
    for (const bool trans_a : {false, true}) {
      for (const bool trans_b : {false, true}) {
        const auto a = exact_values<float>(size * size, 1);
        std::vector<float> c(static_cast<size_t>(size * size),
                             std::numeric_limits<float>::quiet_NaN());
        gemm_tile<float>(trans_a, trans_b, size, size, size, 0.5F, a.data(), size, a.data(), size,
                         0.0F, c.data(), size);
        for (const float value : c) ASSERT_FALSE(std::isnan(value)) << size;
      }
    }
  }
}

// Runs one operation of a program over the given memory, one per value.
void run_op(const Program& program, const std::vector<void*>& memory, int threads) {
  ThreadPool pool(threads);
  const auto view = [&](ValueId id) {
    TensorView tensor;
    tensor.data = memory[static_cast<size_t>(id.index)];
    tensor.dtype = program.value(id).dtype;
    tensor.shape = program.value(id).shape;
    return tensor;
  };
  const OpView op{program, program.op(0)};
  EXPECT_EQ(testing::run_guarded(op, view, pool), "") << op.op.spec->name << " writes beyond it";
}

TEST(GroupedLinear, WeightGradientOverwritesOrAccumulates) {
  // More outputs than a tile has.
  constexpr int64_t kRows = 700, kOutputs = 530, kInputs = 45, kExperts = 3;
  std::vector<int32_t> offsets{0, 620, 620, 680};
  auto dy = exact_values<bf16>(kRows * kOutputs, 5);
  auto x = exact_values<bf16>(kRows * kInputs, 6);
  // Rows beyond the live count hold NaN.
  std::fill(dy.begin() + 680 * kOutputs, dy.end(), bf16(std::nanf("")));
  std::fill(x.begin() + 680 * kInputs, x.end(), bf16(std::nanf("")));
  for (const bool accumulate : {false, true}) {
    auto table = std::make_shared<StateTable>();
    const StateId state = table->add({.name = "g",
                                      .dtype = DType::f32,
                                      .shape = {kExperts, kOutputs, kInputs},
                                      .role = Role::gradient});
    Program program(table);
    Builder builder(program);
    const ValueId dy_id = builder.input("dy", DType::bf16, {kRows, kOutputs});
    const ValueId x_id = builder.input("x", DType::bf16, {kRows, kInputs});
    const ValueId offsets_id = builder.input("offsets", DType::i32, {kExperts + 1});
    const Attributes attributes(GroupedLinearWeightGradientAttributes{.accumulate = accumulate});
    builder.emit(kGroupedLinearWeightGradient, attributes,
                 {dy_id, x_id, offsets_id, builder.state(state)}, "dw");
    std::vector<float> target(kExperts * kOutputs * kInputs, accumulate ? 0.5F : std::nanf(""));
    run_op(program, {dy.data(), x.data(), offsets.data(), target.data()}, 2);
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t n = 0; n < kOutputs; ++n) {
        for (int64_t k = 0; k < kInputs; ++k) {
          double sum = accumulate ? 0.5 : 0;
          for (int32_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e) + 1];
               ++r) {
            sum += static_cast<double>(dy[static_cast<size_t>(r * kOutputs + n)]) *
                   static_cast<double>(x[static_cast<size_t>(r * kInputs + k)]);
          }
          ASSERT_EQ(
              static_cast<double>(target[static_cast<size_t>((e * kOutputs + n) * kInputs + k)]),
              sum)
              << e << ", " << n << ", " << k;
        }
      }
    }
  }
}

// The sum over tokens is split where there are few tiles: each part needs all of the gradient,
// which here has more rows than there are tokens.
TEST(Linear, WeightGradientOfFewTokensKeepsToItsWorkspace) {
  constexpr int64_t kTokens = 1024, kOutputs = 2048, kInputs = 16;
  auto dy = exact_values<float>(kTokens * kOutputs, 9);
  auto x = exact_values<float>(kTokens * kInputs, 10);
  auto table = std::make_shared<StateTable>();
  const StateId state = table->add(
      {.name = "g", .dtype = DType::f32, .shape = {kOutputs, kInputs}, .role = Role::gradient});
  Program program(table);
  Builder builder(program);
  const ValueId dy_id = builder.input("dy", DType::f32, {kTokens, kOutputs});
  const ValueId x_id = builder.input("x", DType::f32, {kTokens, kInputs});
  builder.emit(kLinearWeightGradient, Attributes(LinearWeightGradientAttributes{}),
               {dy_id, x_id, builder.state(state)}, "dw");
  const OpView view{program, program.op(0)};
  const uint64_t target_bytes = kOutputs * kInputs * sizeof(float);
  ASSERT_GE(kLinearWeightGradient.cpu.workspace(view), 2 * target_bytes) << "the sum is not split";
  std::vector<float> target(kOutputs * kInputs);
  run_op(program, {dy.data(), x.data(), target.data()}, 2);
  for (int64_t n = 0; n < kOutputs; n += 67) {
    for (int64_t k = 0; k < kInputs; ++k) {
      double sum = 0;
      for (int64_t t = 0; t < kTokens; ++t) {
        sum += static_cast<double>(dy[static_cast<size_t>(t * kOutputs + n)]) *
               static_cast<double>(x[static_cast<size_t>(t * kInputs + k)]);
      }
      ASSERT_EQ(static_cast<double>(target[static_cast<size_t>(n * kInputs + k)]), sum)
          << n << ", " << k;
    }
  }
}

TEST(Linear, BiasGradientOverwritesOrAccumulates) {
  constexpr int64_t kRows = 3001, kOutputs = 21;
  auto dy = exact_values<bf16>(kRows * kOutputs, 7);
  for (const bool accumulate : {false, true}) {
    auto table = std::make_shared<StateTable>();
    const StateId state =
        table->add({.name = "g", .dtype = DType::f32, .shape = {kOutputs}, .role = Role::gradient});
    Program program(table);
    Builder builder(program);
    const ValueId dy_id = builder.input("dy", DType::bf16, {kRows, kOutputs});
    builder.emit(kLinearBiasGradient,
                 Attributes(LinearBiasGradientAttributes{.bias_dtype = DType::bf16,
                                                         .accumulate = accumulate}),
                 {dy_id, builder.state(state)}, "db");
    std::vector<float> target(kOutputs, accumulate ? 0.25F : std::nanf(""));
    run_op(program, {dy.data(), target.data()}, 3);
    for (int64_t n = 0; n < kOutputs; ++n) {
      double sum = accumulate ? 0.25 : 0;
      for (int64_t t = 0; t < kRows; ++t) {
        sum += static_cast<double>(dy[static_cast<size_t>(t * kOutputs + n)]);
      }
      ASSERT_EQ(static_cast<double>(target[static_cast<size_t>(n)]), sum) << n;
    }
  }
}

}  // namespace
}  // namespace troupe
