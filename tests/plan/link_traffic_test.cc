// What ranks send each other, by group: against plain counts of a step in known layouts.
#include "plan/link_traffic.h"

#include <array>
#include <gtest/gtest.h>
#include <memory>

#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"
#include "ops/exchange/pipeline_message/pipeline_message.h"
#include "ops/exchange/push_rows/push_rows.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/products/linear/linear.h"
#include "ops/registry.h"
#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "program/builder.h"

namespace troupe {
namespace {

// 16 rows of 8 bf16 numbers: 256 bytes.
class SentBytes : public ::testing::Test {
 protected:
  SentBytes() : x(builder.input("x", DType::bf16, {16, 8})) {}

  LinkTraffic sent(int32_t ranks) const {
    return link_traffic(OpView{program, program.op(program.op_count() - 1)}, ranks);
  }
  static void expect(const LinkTraffic& traffic, double bytes, double messages) {
    EXPECT_DOUBLE_EQ(traffic.bytes, bytes);
    EXPECT_DOUBLE_EQ(traffic.messages, messages);
  }

  Program program{std::make_shared<const StateTable>()};
  Builder builder{program};
  ValueId x;
};

TEST_F(SentBytes, OfAGatheredTensorAreItsBlockToEachOther) {
  all_gather(builder, x, {.group = RankGroup::tp, .ranks = 4}, "all");
  expect(sent(4), 3 * 256, 3);
  expect(sent(1), 0, 0);
}

TEST_F(SentBytes, OfSumsAreTermsAndSums) {
  reduce_scatter(builder, x, {.group = RankGroup::tp, .ranks = 4}, "part");
  expect(sent(4), 256 * 3.0 / 4, 3);
  sum_over_ranks(builder, x, {.group = RankGroup::tp}, "sum");
  expect(sent(4), 2 * 256 * 3.0 / 4, 6);
}

TEST_F(SentBytes, OfMessagesAreTheSenders) {
  const ValueId weight = builder.input("weight", DType::bf16, {4, 8});
  const ValueId y = linear(builder, x, weight, {}, "y");
  send(builder, y, {.group = RankGroup::pp, .peer = 1});
  expect(sent(2), 128, 1);
  finish_send(builder, y, {.group = RankGroup::pp, .peer = 1});
  expect(sent(2), 0, 0);
}

// Rows are 16 bytes; 25 of them is what a rank expects of 16 tokens with at most 2 copies each.
TEST_F(SentBytes, OfTokensAreThoseThatAreExpected) {
  const ValueId chosen = builder.input("chosen", DType::i32, {16, 2});
  const DispatchPlan plan = dispatch_plan(builder, chosen, {.experts = 8, .parts = 4}, "plan");
  const RowExchange most = exchange_counts(builder, plan, {.copies = 2}, "received");
  send_rows(builder, x, most, "rows");
  expect(sent(4), 32 * 16 * 3.0 / 4, 3);
  const RowExchange expected =
      exchange_counts(builder, plan, {.copies = 2, .expected_received = 25}, "received_rows");
  const ValueId rows = send_rows(builder, x, expected, "expected_rows");
  expect(sent(4), 25 * 16 * 3.0 / 4, 3);
  EXPECT_EQ(program.value(rows).shape[0], 4 * 16) << "the worst case has room";
  EXPECT_EQ(program.with_expected_rows().value(rows).shape[0], 25);
  return_rows(builder, rows, expected, "back");
  expect(sent(4), 25 * 16 * 3.0 / 4, 3);
  const PushedRows pushed =
      push_rows(builder, std::array{x}, plan, {.expected_received = 25}, "pushed");
  expect(sent(4), (25 * 16 + 4 * 4) * 3.0 / 4, 3);  // and how many there are, for each rank
  push_rows_back(builder, pushed.rows[0], plan, pushed.received, {.expected_received = 25}, "home");
  expect(sent(4), 25 * 16 * 3.0 / 4, 3);
}

TEST_F(SentBytes, OfOperationsOfOneRankAreNone) {
  const ValueId weight = builder.input("weight", DType::bf16, {4, 8});
  linear(builder, x, weight, {}, "y");
  expect(sent(8), 0, 0);
}

TEST_F(SentBytes, AreSummedByGroup) {
  all_gather(builder, x, {.group = RankGroup::tp, .ranks = 2}, "all");
  reduce_scatter(builder, x, {.group = RankGroup::tp, .ranks = 2}, "part");
  sum_over_ranks(builder, x, {.group = RankGroup::dp}, "sum");
  const Layout layout(LayoutOptions{.world_size = 4, .tensor_parallel = 2});
  const auto traffic = link_traffic(program, layout, 0);
  ASSERT_EQ(traffic.size(), 2U);
  EXPECT_EQ(traffic[0].group, RankGroup::tp);
  EXPECT_EQ(traffic[0].operations, 2);
  expect(traffic[0].sent, 256 + 128, 2);
  EXPECT_EQ(traffic[1].group, RankGroup::dp);
  expect(traffic[1].sent, 256, 2);
  EXPECT_EQ(text_of(traffic),
            "tp of 2 ranks 384 B in 2 messages; dp of 2 ranks 256 B in 2 messages");
}

// Whatever joins ranks says what it sends, except for the ends of messages.
TEST(LinkTraffic, IsStatedByEveryCollective) {
  for (const OpSpec* spec : all_operations()) {
    const bool ends_message = spec == &kFinishSend || spec == &kReceive;
    EXPECT_EQ(spec->links != nullptr, spec->group != nullptr && !ends_message) << spec->name;
  }
}

// Products are a part of all arithmetic, and of the operands' dtype.
TEST(Cost, TellsProductsFromOtherArithmetic) {
  Program program(std::make_shared<const StateTable>());
  Builder builder(program);
  const ValueId x = builder.input("x", DType::bf16, {16, 8});
  const ValueId weight = builder.input("weight", DType::bf16, {4, 8});
  const auto last = [&] {
    const Op& op = program.op(program.op_count() - 1);
    return op.spec->cost(OpView{program, op});
  };
  linear(builder, x, weight, {}, "y");
  EXPECT_EQ(last().flops, 2 * 16 * 4 * 8);
  EXPECT_EQ(last().product_flops, last().flops);
  EXPECT_EQ(last().product_dtype, DType::bf16);
  linear(builder, x, weight, {.bias = {}, .output = LinearOutput::f64}, "logits");
  EXPECT_EQ(last().product_dtype, DType::f64);
  sum_over_ranks(builder, x, {.group = RankGroup::tp}, "sum");
  EXPECT_GT(last().flops, 0);
  EXPECT_EQ(last().product_flops, 0);
}

}  // namespace
}  // namespace troupe
