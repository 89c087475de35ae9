// What the shape rules of operations refuse that no kernel would notice: it would compute something
// else, or read beyond an operand.
#include <gtest/gtest.h>
#include <memory>

#include "ops/attention/attention/attention.h"
#include "ops/attention/join_rotated/join_rotated.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/copy_to_ranks/copy_to_ranks.h"
#include "ops/exchange/exchange_heads/exchange_heads.h"
#include "ops/exchange/pipeline_message/pipeline_message.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/losses/load_balancing_loss/load_balancing_loss.h"
#include "ops/losses/router_z_loss/router_z_loss.h"
#include "ops/routing/count_experts/count_experts.h"
#include "program/builder.h"

namespace troupe::testing {
namespace {

class ShapeRulesDeathTest : public ::testing::Test {
 protected:
  Program program{std::make_shared<const StateTable>()};
  Builder builder{program};
};

// Other ranks do not know how many rows are live.
TEST_F(ShapeRulesDeathTest, CollectivesTakeNoRaggedRows) {
  const ValueId counter = builder.input("counter", DType::i32, {1});
  const ValueId ragged = program.add_value(Value{.name = "ragged",
                                                 .dtype = DType::f32,
                                                 .shape = {4, 4},
                                                 .role = Role::activation,
                                                 .rows = {.counter = counter, .element = 0}});
  EXPECT_DEATH(all_gather(builder, ragged, {.ranks = 2}, "y"), "not ragged: ragged");
  EXPECT_DEATH(reduce_scatter(builder, ragged, {.ranks = 2}, "y"), "ragged");
  EXPECT_DEATH(sum_over_ranks(builder, ragged, {}, "y"), "ragged");
  EXPECT_DEATH(copy_to_ranks(builder, ragged, {}, "y"), "ragged");
  EXPECT_DEATH(all_reduce(builder, {{ragged}}, {}), "all_reduce: ragged: ragged");
  EXPECT_DEATH(send(builder, ragged, {}), "ragged");
  const ExchangeHeadsAttributes heads{
      .chunks = {.ranks = 1}, .batch = 1, .sequence = 4, .heads = 2, .groups = 1, .head_dim = 1};
  EXPECT_DEATH(sequence_to_heads(builder, ragged, heads, "y"), "ragged");
}

// A rank's heads are some of those that have sinks.
TEST_F(ShapeRulesDeathTest, SinksAreThereForEachHead) {
  const AttentionAttributes attributes{
      .batch = 1, .sequence = 3, .heads = 2, .groups = 1, .head_dim = 4, .first_sink = 2};
  const ValueId qkv = builder.input("qkv", DType::f32, {3, 16});
  attention(builder, {qkv, qkv}, {.sinks = builder.input("sinks", DType::f32, {4})}, attributes,
            "y");
  const ValueId fewer = builder.input("fewer", DType::f32, {3});
  EXPECT_DEATH(attention(builder, {qkv, qkv}, {.sinks = fewer}, attributes, "y"), "sinks fewer");
}

// The tokens of a rank are [first_token, first_token + T) of sequences * sequence_tokens.
TEST_F(ShapeRulesDeathTest, TokensLieWithinTheirSequences) {
  const ValueId logits = builder.input("logits", DType::f32, {4, 3});
  const ValueId counts = builder.input("counts", DType::i32, {2, 3});
  const ValueId indices = builder.input("indices", DType::i32, {4, 1});
  const auto loss = [&](int32_t first_token, int32_t sequence_tokens) {
    load_balancing_loss(builder, logits, counts,
                        {.coefficient = 1,
                         .sequences = 2,
                         .sequence_tokens = sequence_tokens,
                         .first_token = first_token},
                        "loss");
  };
  const auto count = [&](int32_t first_token, int32_t sequence_tokens) {
    count_experts(builder, indices, {},
                  {.experts = 3,
                   .sequences = 2,
                   .sequence_tokens = sequence_tokens,
                   .first_token = first_token},
                  "counts");
  };
  loss(2, 3);
  count(2, 3);
  for (const auto& [first_token, sequence_tokens] : {std::pair(3, 3), {-1, 3}, {1, 0}}) {
    EXPECT_DEATH(loss(first_token, sequence_tokens), "sequences of equal length");
    EXPECT_DEATH(count(first_token, sequence_tokens), "sequences of equal length");
  }
}

// Kernels read what belongs to a token or a row by its number.
TEST_F(ShapeRulesDeathTest, OperandsOfTokensAreThereForEach) {
  const ValueId logits = builder.input("logits", DType::f32, {4, 3});
  const ValueId count = builder.input("count", DType::i32, {1});
  const ValueId fewer = builder.input("fewer", DType::i32, {3});
  const auto loss = [&](const ValidTokens& valid) {
    router_z_loss(builder, logits, {.coefficient = 1}, "loss", valid);
  };
  EXPECT_DEATH(loss({.mask = fewer, .count = count}), "needs an i32 mask \\[T\\]: fewer");
  EXPECT_DEATH(loss({.mask = builder.input("mask", DType::i32, {4}), .count = fewer}),
               "needs an i32 count \\[1\\]: fewer");

  const ValueId x = builder.input("x", DType::f32, {4, 6});
  const ValueId weights = builder.input("weights", DType::f32, {2, 2});
  EXPECT_DEATH(activation(builder, x, weights, {}, {}, "y"), "weights and row_slot come together");
  EXPECT_DEATH(activation(builder, x, {}, fewer, {}, "y"), "weights and row_slot come together");
  EXPECT_DEATH(activation(builder, x, weights, fewer, {}, "y"), "row_slot");

  const JoinRotatedAttributes rotated{.heads = 1, .plain_dim = 2, .rotary_dim = 4, .sequence = 4};
  const ValueId plain = builder.input("plain", DType::f32, {4, 2});
  const ValueId turning = builder.input("turning", DType::f32, {4, 4});
  join_rotated(builder, plain, turning, builder.input("table", DType::f32, {4, 2, 2}), rotated,
               "y");
  for (const Shape& shape : {Shape{3, 2, 2}, Shape{4, 1, 2}, Shape{4, 2, 1}}) {
    const ValueId table = builder.input("short", DType::f32, shape);
    EXPECT_DEATH(join_rotated(builder, plain, turning, table, rotated, "y"),
                 "table does not fit: short");
  }
}

}  // namespace
}  // namespace troupe::testing
