// The forms of attention over several ranks, against attention on one: outputs and gradients of
// every rank's rows, in every dtype.
#include "ops/attention/context_attention/context_attention.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "program/builder.h"
#include "support/context_run.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

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

class ContextAttention : public ::testing::TestWithParam<ContextCase> {};

TEST_P(ContextAttention, EqualsOneRank) {
  const ContextCase& c = GetParam();
  const ContextOutcome expected = run_context(c, 1, ContextExchange::p2p);
  const double tolerance = tolerance_of(c.dtype);
  for (const ContextExchange exchange :
       {ContextExchange::p2p, ContextExchange::a2a, ContextExchange::allgather}) {
    if (exchange == ContextExchange::a2a && c.whole.groups % c.ranks != 0) continue;
    SCOPED_TRACE(name_of(exchange));
    const ContextOutcome found = run_context(c, c.ranks, exchange);
    expect_close(found.out, expected.out, tolerance);
    expect_close(found.d_qkv, expected.d_qkv, tolerance);
  }
}

TEST_P(ContextAttention, ByHeadsHasTheBitsOfOneRank) {
  const ContextCase& c = GetParam();
  if (c.whole.groups % c.ranks != 0) return;  // refused
  const ContextOutcome expected = run_context(c, 1, ContextExchange::p2p);
  const ContextOutcome found = run_context(c, c.ranks, ContextExchange::a2a);
  EXPECT_EQ(found.out, expected.out);
  EXPECT_EQ(found.d_qkv, expected.d_qkv);
}

TEST_P(ContextAttention, RingAndGatheredKeysGiveTheSameBits) {
  const ContextCase& c = GetParam();
  const ContextOutcome ring = run_context(c, c.ranks, ContextExchange::p2p);
  EXPECT_EQ(ring.out, run_context(c, c.ranks, ContextExchange::allgather).out);
  // Whatever the timing.
  const ContextOutcome again = run_context(c, c.ranks, ContextExchange::p2p);
  EXPECT_EQ(again.out, ring.out);
  EXPECT_EQ(again.d_qkv, ring.d_qkv);
}

// Own keys and values, and those that arrive.
TEST(ContextAttentionWorkspace, OnlyTheRingHasKeysThatTravel) {
  const ContextAttentionAttributes attributes{
      .attention = {.batch = 2, .sequence = 24, .heads = 4, .groups = 2, .head_dim = 5, .scale = 1},
      .chunks = {.ranks = 2, .rank = 1}};
  Program program(std::make_shared<const StateTable>());
  Builder builder(program);
  const ValueId q = builder.input("q", DType::f32, {48, 20});
  const ValueId own = builder.input("own", DType::f32, {48, 20});
  const ValueId all = builder.input("all", DType::f32, {96, 20});
  context_attention(builder, {q, all}, {}, attributes, "gathered");
  ring_attention(builder, {q, own}, {}, attributes, "ring");
  const auto workspace = [&](int32_t op) {
    return program.value(program.op(op).workspace).bytes();
  };
  EXPECT_EQ(workspace(1) - workspace(0), 2 * program.value(own).bytes());
}

std::vector<ContextCase> cases() {
  const AttentionAttributes small{
      .batch = 2, .sequence = 24, .heads = 4, .groups = 4, .head_dim = 5, .scale = 0.45};
  AttentionAttributes grouped = small;
  grouped.heads = 6;
  grouped.groups = 2;
  AttentionAttributes small_values = small;
  small_values.value_dim = 3;
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
  // Keys and values of more elements than one thread takes at a time.
  const AttentionAttributes wide{
      .sequence = 80, .heads = 3, .groups = 3, .head_dim = 150, .scale = 0.08};
  // Rows of two sequences of 24 tokens: within chunks, across them, at their borders; a whole
  // sequence. And of one of 1,080 tokens, of one token and of more than a chunk of 270.
  const std::vector<int64_t> documents = {3, 6, 7, 18, 24 + 5, 24 + 12};
  const std::vector<int64_t> some_documents = {20};
  const std::vector<int64_t> large_documents = {128, 129, 270, 700, 810};
  std::vector<ContextCase> all;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const std::string suffix = "_" + std::string(name_of(dtype));
    for (const int32_t ranks : {2, 3, 4}) {
      const std::string on = "_on_" + std::to_string(ranks) + suffix;
      all.push_back({"small" + on, ranks, small, dtype});
      all.push_back({"grouped" + on, ranks, grouped, dtype});
      all.push_back({"small_values" + on, ranks, small_values, dtype});
      all.push_back({"window" + on, ranks, window, dtype});
      all.push_back({"dropout" + on, ranks, dropout, dtype});
      all.push_back({"documents" + on, ranks, small, dtype, documents});
      all.push_back({"documents_grouped" + on, ranks, grouped, dtype, some_documents});
      all.push_back({"documents_dropout" + on, ranks, dropout, dtype, documents});
      all.push_back({"own_queries" + on, ranks, small_values, dtype, {}, true});
      all.push_back({"own_queries_documents" + on, ranks, grouped, dtype, documents, true});
    }
    all.push_back({"wide" + suffix, 2, wide, dtype});
    all.push_back({"wide_on_8" + suffix, 8, wide, dtype});
    all.push_back({"blocks" + suffix, 2, blocks, dtype});
    all.push_back({"blocks_window" + suffix, 2, blocks_window, dtype});
    all.push_back({"documents_blocks" + suffix, 2, blocks, dtype, large_documents});
    all.push_back({"documents_blocks_window" + suffix, 2, blocks_window, dtype, large_documents});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Ranks, ContextAttention, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
