// Collectives of activations: their values and those of their derivatives on every rank, in the
// order of sums that is promised, for every dtype.
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "comm/thread_group.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/copy_to_ranks/copy_to_ranks.h"
#include "ops/exchange/gather_parameter/gather_parameter.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "passes/autodiff.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe {
namespace {

constexpr std::chrono::milliseconds kPatient{60'000};
constexpr int64_t kWidth = 37;

using Build = std::function<ValueId(Builder&, ValueId x)>;
using Numbers = std::vector<double>;

double load(const TensorView& view, int64_t i) {
  switch (view.dtype) {
    case DType::f64:
      return view.as<double>()[i];
    case DType::f32:
      return view.as<float>()[i];
    case DType::bf16:
      return view.as<bf16>()[i];
    default:
      return view.as<int32_t>()[i];
  }
}

void store(const TensorView& view, int64_t i, double value) {
  switch (view.dtype) {
    case DType::f64:
      view.as<double>()[i] = value;
      return;
    case DType::f32:
      view.as<float>()[i] = static_cast<float>(value);
      return;
    case DType::bf16:
      view.as<bf16>()[i] = bf16(value);
      return;
    default:
      view.as<int32_t>()[i] = static_cast<int32_t>(value);
  }
}

Numbers numbers_of(const TensorView& view) {
  Numbers numbers;
  for (int64_t i = 0; i < view.shape.elements(); ++i) numbers.push_back(load(view, i));
  return numbers;
}

// A number that `dtype` can hold, and that is not a round one.
double draw(DType dtype, int rank, uint32_t what, int64_t i) {
  const double value = random_normal(5, RandomStream::test, static_cast<uint32_t>(rank) * 4 + what,
                                     static_cast<uint64_t>(i));
  if (dtype == DType::f64) return value;
  if (dtype == DType::f32) return static_cast<float>(value);
  if (dtype == DType::bf16) return bf16(value);
  return static_cast<int32_t>(1000 * value);
}

Numbers draw_all(DType dtype, int rank, uint32_t what, int64_t rows) {
  Numbers numbers;
  for (int64_t i = 0; i < rows * kWidth; ++i) numbers.push_back(draw(dtype, rank, what, i));
  return numbers;
}

// The sum in ascending order of ranks, in the accumulation dtype, rounded once.
double sum_in_order(DType dtype, const Numbers& terms) {
  if (dtype == DType::f64 || dtype == DType::i32) {
    double sum = terms[0];
    for (size_t r = 1; r < terms.size(); ++r) sum += terms[r];
    return sum;
  }
  auto sum = static_cast<float>(terms[0]);
  for (size_t r = 1; r < terms.size(); ++r) sum += static_cast<float>(terms[r]);
  return dtype == DType::f32 ? sum : static_cast<float>(bf16(sum));
}

struct Outcome {
  Numbers y;
  Numbers d_x;  // empty for integers
};

// x, y = build(x), and the gradient of x where that of y is given; on every rank.
std::vector<Outcome> run(int ranks, DType dtype, int64_t rows_in, int64_t rows_out,
                         const Build& build) {
  ThreadGroup group(ranks, kPatient);
  std::vector<Outcome> runs(static_cast<size_t>(ranks));
  run_ranks(group, [&](int rank) {
    const auto table = std::make_shared<const StateTable>();
    Program program(table);
    Builder builder(program);
    const ValueId x = builder.input("x", dtype, {rows_in, kWidth});
    const ValueId d_y = builder.input("d_y", dtype, {rows_out, kWidth});
    const ValueId y = build(builder, x);
    ASSERT_EQ(builder.value(y).shape, Shape({rows_out, kWidth}));
    program.add_result(y);
    ValueId d_x;
    if (is_float(dtype)) {
      MainGradients main_gradients(*table);
      const std::vector<GradientSeed> seeds = {{y, d_y}};
      const std::vector<ValueId> wanted = {x};
      d_x = append_backward(builder, 0, program.op_count(), seeds, wanted, main_gradients)[x];
      program.add_result(d_x);
    }
    verify_program(program);
    Communicators communicators;
    communicators.of(RankGroup::tp) = &group.member(rank);
    const StateStorage storage(table);
    ThreadPool pool(1 + rank % 2);
    CpuInterpreter interpreter(program, plan_memory(program, 1 + rank % 2), storage, pool,
                               communicators);
    const Numbers x_data = draw_all(dtype, rank, 0, rows_in);
    const Numbers d_y_data = draw_all(dtype, rank, 1, rows_out);
    for (size_t i = 0; i < x_data.size(); ++i) {
      store(interpreter.view(x), static_cast<int64_t>(i), x_data[i]);
    }
    for (size_t i = 0; i < d_y_data.size(); ++i) {
      store(interpreter.view(d_y), static_cast<int64_t>(i), d_y_data[i]);
    }
    interpreter.run();
    Outcome& mine = runs[static_cast<size_t>(rank)];
    mine.y = numbers_of(interpreter.view(y));
    if (d_x.valid()) mine.d_x = numbers_of(interpreter.view(d_x));
  });
  return runs;
}

struct Case {
  int ranks;
  DType dtype;
};

class RankTensors : public ::testing::TestWithParam<Case> {
 protected:
  int ranks() const { return GetParam().ranks; }
  DType dtype() const { return GetParam().dtype; }
  // All ranks' numbers, one rank's after the other's.
  Numbers gathered(uint32_t what, int64_t rows) const {
    Numbers all;
    for (int rank = 0; rank < ranks(); ++rank) {
      const Numbers own = draw_all(dtype(), rank, what, rows);
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
  Numbers summed(uint32_t what, int64_t rows) const {
    Numbers sums;
    for (int64_t i = 0; i < rows * kWidth; ++i) {
      Numbers terms;
      for (int rank = 0; rank < ranks(); ++rank) terms.push_back(draw(dtype(), rank, what, i));
      sums.push_back(sum_in_order(dtype(), terms));
    }
    return sums;
  }
  Numbers block(const Numbers& all, int rank) const {
    const auto size = static_cast<int64_t>(all.size()) / ranks();
    return {all.begin() + rank * size, all.begin() + (rank + 1) * size};
  }
  void expect(const std::vector<Outcome>& runs, const std::function<Numbers(int)>& y,
              const std::function<Numbers(int)>& d_x) const {
    for (int rank = 0; rank < ranks(); ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      EXPECT_EQ(runs[static_cast<size_t>(rank)].y, y(rank));
      if (is_float(dtype())) {
        EXPECT_EQ(runs[static_cast<size_t>(rank)].d_x, d_x(rank));
      }
    }
  }
};

constexpr int64_t kRows = 5;

TEST_P(RankTensors, AreGathered) {
  const int64_t all = kRows * ranks();
  const auto runs = run(ranks(), dtype(), kRows, all, [&](Builder& builder, ValueId x) {
    return all_gather(builder, x, {.group = RankGroup::tp, .ranks = ranks()}, "y");
  });
  expect(
      runs, [&](int) { return gathered(0, kRows); },
      [&](int rank) { return block(summed(1, all), rank); });
}

TEST_P(RankTensors, AreSummedAndScattered) {
  const int64_t all = kRows * ranks();
  const auto runs = run(ranks(), dtype(), all, kRows, [&](Builder& builder, ValueId x) {
    return reduce_scatter(builder, x, {.group = RankGroup::tp, .ranks = ranks()}, "y");
  });
  expect(
      runs, [&](int rank) { return block(summed(0, all), rank); },
      [&](int) { return gathered(1, kRows); });
}

TEST_P(RankTensors, AreSummed) {
  const auto runs = run(ranks(), dtype(), kRows, kRows, [&](Builder& builder, ValueId x) {
    return sum_over_ranks(builder, x, {.group = RankGroup::tp}, "y");
  });
  expect(
      runs, [&](int) { return summed(0, kRows); },
      [&](int rank) { return draw_all(dtype(), rank, 1, kRows); });
}

TEST_P(RankTensors, AreCopied) {
  if (!is_float(dtype())) return;  // for tensors with gradients alone
  const auto runs = run(ranks(), dtype(), kRows, kRows, [&](Builder& builder, ValueId x) {
    return copy_to_ranks(builder, x, {.group = RankGroup::tp}, "y");
  });
  expect(
      runs, [&](int rank) { return draw_all(dtype(), rank, 0, kRows); },
      [&](int) { return summed(1, kRows); });
}

// Copies are cut into pieces of 256 KiB.
TEST(LargeRankTensors, AreCopied) {
  constexpr int64_t kManyRows = 2000;
  const auto runs = run(2, DType::f32, kManyRows, kManyRows, [](Builder& builder, ValueId x) {
    return copy_to_ranks(builder, x, {.group = RankGroup::tp}, "y");
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(runs[static_cast<size_t>(rank)].y, draw_all(DType::f32, rank, 0, kManyRows)) << rank;
  }
}

// Shards are copied, and their gradients stored, in pieces of 16,384 elements.
TEST(LargeRankTensors, ShardsAreGathered) {
  constexpr int64_t kManyRows = 1001;
  constexpr int kShards = 2;
  ThreadGroup group(kShards, kPatient);
  Numbers whole;
  for (int rank = 0; rank < kShards; ++rank) {
    const IndexRange own = shard_of({kManyRows, kWidth}, {rank, kShards});
    for (int64_t i = 0; i < own.end - own.begin; ++i) {
      whole.push_back(draw(DType::f64, rank, 0, i));
    }
  }
  run_ranks(group, [&](int rank) {
    const auto table = std::make_shared<const StateTable>();
    Program program(table);
    Builder builder(program);
    const GatherParameterAttributes attributes{
        .group = RankGroup::tp, .shard = {rank, kShards}, .shape = {kManyRows, kWidth}};
    const ValueId shard =
        builder.input("shard", DType::f64, shape_of_shard(attributes.shape, attributes.shard));
    const ValueId gathered = gather_parameter(builder, shard, attributes, "gathered");
    program.add_result(gathered);
    MainGradients main_gradients(*table);
    const std::vector<GradientSeed> seeds = {{gathered, gathered}};
    const std::vector<ValueId> wanted = {shard};
    const ValueId d_shard =
        append_backward(builder, 0, program.op_count(), seeds, wanted, main_gradients)[shard];
    program.add_result(d_shard);
    Communicators communicators;
    communicators.of(RankGroup::tp) = &group.member(rank);
    const StateStorage storage(table);
    ThreadPool pool(2);
    CpuInterpreter interpreter(program, plan_memory(program, 2), storage, pool, communicators);
    const TensorView view = interpreter.view(shard);
    for (int64_t i = 0; i < view.shape.elements(); ++i) {
      store(view, i, draw(DType::f64, rank, 0, i));
    }
    interpreter.run();
    EXPECT_EQ(numbers_of(interpreter.view(gathered)), whole);
    // Every rank's gradient is the same: the shard's is the double of its numbers.
    Numbers doubled = numbers_of(view);
    for (double& number : doubled) number *= kShards;
    EXPECT_EQ(numbers_of(interpreter.view(d_shard)), doubled);
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i32}) {
      all.push_back({ranks, dtype});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Groups, RankTensors, ::testing::ValuesIn(cases()), [](const auto& info) {
  return std::string(name_of(info.param.dtype)) + "_on_" + std::to_string(info.param.ranks);
});

}  // namespace
}  // namespace troupe
