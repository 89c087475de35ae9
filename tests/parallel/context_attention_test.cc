// The forms of attention over several ranks, against attention on one: outputs and gradients of
// every rank's rows, in every dtype.
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "model/context_parallel.h"
#include "parallel/rank_communicators.h"
#include "parallel/thread_group.h"
#include "passes/autodiff.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe {
namespace {

using Numbers = std::vector<double>;

constexpr std::chrono::milliseconds kPatient{60'000};
constexpr int64_t kStep = 6;

double load(const TensorView& view, int64_t i) {
  if (view.dtype == DType::f64) return view.as<double>()[i];
  if (view.dtype == DType::f32) return view.as<float>()[i];
  return view.as<bf16>()[i];
}

void store(const TensorView& view, int64_t i, double value) {
  if (view.dtype == DType::f64) view.as<double>()[i] = value;
  if (view.dtype == DType::f32) view.as<float>()[i] = static_cast<float>(value);
  if (view.dtype == DType::bf16) view.as<bf16>()[i] = bf16(static_cast<float>(value));
}

struct Case {
  std::string name;
  int32_t ranks = 2;
  AttentionAttributes whole;  // of one rank
  DType dtype = DType::f64;
};

struct Outcome {
  Numbers out;    // [B S, H d]
  Numbers d_qkv;  // [B S, (H + 2 G) d]
};

std::shared_ptr<const RunLayout> layout_of(int32_t ranks) {
  LayoutOptions options;
  options.world_size = ranks;
  options.context_parallel = ranks;
  RunLayout run = layout_of_one_rank(1);
  return std::make_shared<const RunLayout>(
      RunLayout{.layout = Layout(options), .partition = run.partition, .schedule = run.schedule});
}

// On `ranks` ranks, put together by position.
Outcome run(const Case& c, int32_t ranks, ContextExchange exchange) {
  const AttentionAttributes& whole = c.whole;
  const int64_t width = int64_t{whole.heads + 2 * whole.groups} * whole.head_dim;
  const int64_t out_width = int64_t{whole.heads} * whole.head_dim;
  const int64_t tokens = int64_t{whole.batch} * whole.sequence;
  Outcome outcome{.out = Numbers(static_cast<size_t>(tokens * out_width)),
                  .d_qkv = Numbers(static_cast<size_t>(tokens * width))};
  const std::shared_ptr<const RunLayout> layout = layout_of(ranks);
  ThreadGroup group(ranks, kPatient);
  run_ranks(group, [&](int rank) {
    const ModelPart part{.run = layout, .rank = rank};
    AttentionAttributes own = whole;
    own.sequence = whole.sequence / ranks;
    const int64_t rows = tokens / ranks;
    const auto table = std::make_shared<const StateTable>();
    Program program(table);
    Builder builder(program);
    const ValueId qkv = builder.input("qkv", c.dtype, {rows, width});
    const ValueId d_out = builder.input("d_out", c.dtype, {rows, out_width});
    const ValueId step = whole.probability > 0 ? builder.input("step", DType::i64, {1}) : ValueId{};
    const ValueId out = attend_over_context(builder, part, exchange, qkv, step, own, "out");
    program.add_result(out);
    MainGradients main_gradients(*table);
    const std::vector<GradientSeed> seeds = {{out, d_out}};
    const std::vector<ValueId> wanted = {qkv};
    const ValueId d_qkv = append_backward(builder, 0, program.op_count(), seeds, wanted,
                                          main_gradients)[static_cast<size_t>(qkv.index)];
    program.add_result(d_qkv);
    verify_program(program);
    const StateStorage storage(table);
    ThreadPool pool(1 + rank % 2);
    CpuInterpreter interpreter(program, plan_memory(program, 1 + rank % 2), storage, pool,
                               communicators_of(group, layout->layout, rank));
    // visit(element here, element of the whole) of a tensor with rows of `columns`.
    const auto each = [&](int64_t columns, const auto& visit) {
      const RowOrigin origin = row_origin(part, own.sequence, rows);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < columns; ++i) {
          visit(row * columns + i, origin.whole_row(row) * columns + i);
        }
      }
    };
    const auto draw = [&](ValueId id, uint32_t what, int64_t columns) {
      each(columns, [&](int64_t here, int64_t element) {
        store(interpreter.view(id), here,
              random_normal(5, RandomStream::test, what, static_cast<uint64_t>(element)));
      });
    };
    draw(qkv, 0, width);
    draw(d_out, 1, out_width);
    if (step.valid()) *interpreter.view(step).as<int64_t>() = kStep;
    interpreter.run();
    interpreter.run();  // nothing is left over from the first time
    each(out_width, [&](int64_t here, int64_t element) {
      outcome.out[static_cast<size_t>(element)] = load(interpreter.view(out), here);
    });
    each(width, [&](int64_t here, int64_t element) {
      outcome.d_qkv[static_cast<size_t>(element)] = load(interpreter.view(d_qkv), here);
    });
  });
  return outcome;
}

// Values are about 1 and sums have some hundred terms: errors of rounding are some units in the
// last place of the largest element; bf16 results and gradients are rounded up to three times.
double tolerance_of(DType dtype) {
  if (dtype == DType::f64) return 1e-13;
  return dtype == DType::f32 ? 2e-5 : 0.03;
}

void expect_close(const Numbers& found, const Numbers& expected, double tolerance) {
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(found[i], expected[i], tolerance * largest) << "element " << i;
  }
}

class ContextAttention : public ::testing::TestWithParam<Case> {};

TEST_P(ContextAttention, EqualsOneRank) {
  const Case& c = GetParam();
  const Outcome expected = run(c, 1, ContextExchange::p2p);
  const double tolerance = tolerance_of(c.dtype);
  for (const ContextExchange exchange :
       {ContextExchange::p2p, ContextExchange::a2a, ContextExchange::allgather}) {
    if (exchange == ContextExchange::a2a && c.whole.groups % c.ranks != 0) continue;
    SCOPED_TRACE(name_of(exchange));
    const Outcome found = run(c, c.ranks, exchange);
    expect_close(found.out, expected.out, tolerance);
    expect_close(found.d_qkv, expected.d_qkv, tolerance);
  }
}

TEST_P(ContextAttention, ByHeadsHasTheBitsOfOneRank) {
  const Case& c = GetParam();
  if (c.whole.groups % c.ranks != 0) return;  // refused
  const Outcome expected = run(c, 1, ContextExchange::p2p);
  const Outcome found = run(c, c.ranks, ContextExchange::a2a);
  EXPECT_EQ(found.out, expected.out);
  EXPECT_EQ(found.d_qkv, expected.d_qkv);
}

TEST_P(ContextAttention, RingAndGatheredKeysGiveTheSameBits) {
  const Case& c = GetParam();
  const Outcome ring = run(c, c.ranks, ContextExchange::p2p);
  EXPECT_EQ(ring.out, run(c, c.ranks, ContextExchange::allgather).out);
  // Whatever the timing.
  const Outcome again = run(c, c.ranks, ContextExchange::p2p);
  EXPECT_EQ(again.out, ring.out);
  EXPECT_EQ(again.d_qkv, ring.d_qkv);
}

std::vector<Case> cases() {
  const AttentionAttributes small{
      .batch = 2, .sequence = 24, .heads = 4, .groups = 4, .head_dim = 5, .scale = 0.45};
  AttentionAttributes grouped = small;
  grouped.heads = 6;
  grouped.groups = 2;
  AttentionAttributes window = small;
  window.window = 5;
  AttentionAttributes dropout = window;
  dropout.substream = 3;
  dropout.seed = 2;
  dropout.probability = 0.3;
  // Chunks of several blocks.
  AttentionAttributes blocks{
      .sequence = 1080, .heads = 2, .groups = 2, .head_dim = 4, .scale = 0.5};
  AttentionAttributes blocks_window = blocks;
  blocks_window.window = 300;
  blocks_window.seed = 2;
  blocks_window.probability = 0.1;
  std::vector<Case> all;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const std::string suffix = "_" + std::string(name_of(dtype));
    for (const int32_t ranks : {2, 3, 4}) {
      const std::string on = "_on_" + std::to_string(ranks) + suffix;
      all.push_back({"small" + on, ranks, small, dtype});
      all.push_back({"grouped" + on, ranks, grouped, dtype});
      all.push_back({"window" + on, ranks, window, dtype});
      all.push_back({"dropout" + on, ranks, dropout, dtype});
    }
    all.push_back({"blocks" + suffix, 2, blocks, dtype});
    all.push_back({"blocks_window" + suffix, 2, blocks_window, dtype});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Ranks, ContextAttention, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe
