// The check of reorderings: every kind of dependency is seen.
#include "passes/overlap.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/exchange/pipeline_message/pipeline_message.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "program/builder.h"

namespace troupe {
namespace {

class VerifyOrder : public ::testing::Test {
 protected:
  // 0: a, 1: b, 2: c = a + b, 3: total = a, 4: total += c, 5: d = sum of total's kind, 6, 7: two
  // messages
  VerifyOrder() : program(std::make_shared<StateTable>()), builder(program) {
    const ValueId total = builder.metric("total", DType::f64, {2});
    const ValueId a = fill(builder, 1, DType::f64, {2}, "a");
    const ValueId b = fill(builder, 2, DType::f64, {2}, "b");
    const ValueId c = add(builder, a, b, "c");
    accumulate(builder, total, a, 1, /*overwrite=*/true);
    accumulate(builder, total, c, 1, /*overwrite=*/false);
    fill(builder, 3, DType::f64, {2}, "d");
    send(builder, c, {.peer = 1});
    finish_send(builder, c, {.peer = 1});
  }

  Program program;
  Builder builder;
};

TEST_F(VerifyOrder, AcceptsWhatDependsOnNothingBetween) {
  verify_order(program, std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  verify_order(program, std::vector<int32_t>{5, 1, 0, 3, 2, 6, 4, 7});
  verify_order(program, std::vector<int32_t>{0, 1, 2, 3, 4, 6, 7});
}

TEST_F(VerifyOrder, RefusesUseBeforeDefinition) {
  EXPECT_DEATH(verify_order(program, std::vector<int32_t>{0, 2, 1, 3, 4, 5, 6, 7}),
               "operation 2 \\(add\\) was moved across an operation that it depends on");
}

// How many rows of x there are says an operation that must come first, though x itself is there.
TEST(VerifyOrderOfRows, RefusesUseBeforeTheirNumberIsKnown) {
  Program program(std::make_shared<StateTable>());
  Builder builder(program);
  const ValueId indices = builder.input("indices", DType::i32, {4, 1});
  const DispatchPlan plan = dispatch_plan(builder, indices, {.experts = 2, .parts = 2}, "plan");
  const ValueId x = program.add_value({.name = "x",
                                       .dtype = DType::f64,
                                       .shape = {4, 2},
                                       .role = Role::input,
                                       .rows = {.counter = plan.counts, .element = 1}});
  add(builder, x, x, "y");
  verify_order(program, std::vector<int32_t>{0, 1});
  EXPECT_DEATH(verify_order(program, std::vector<int32_t>{1, 0}),
               "operation 1 \\(add\\) was moved across an operation that it depends on");
}

TEST_F(VerifyOrder, RefusesChangesInPlaceInAnotherOrder) {
  EXPECT_DEATH(verify_order(program, std::vector<int32_t>{0, 1, 2, 4, 3, 5, 6, 7}),
               "operation 4 \\(accumulate\\) was moved across");
}

TEST_F(VerifyOrder, RefusesLeavingOutWhatIsRead) {
  EXPECT_DEATH(verify_order(program, std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7}),
               "operation 2 \\(add\\) was moved across");
}

TEST_F(VerifyOrder, RefusesOperationsTwice) {
  EXPECT_DEATH(verify_order(program, std::vector<int32_t>{0, 1, 1, 2, 3, 4, 5, 6, 7}),
               "an order names each operation once: 1");
}

TEST_F(VerifyOrder, RefusesMessagesInAnotherOrder) {
  EXPECT_DEATH(verify_order(program, std::vector<int32_t>{0, 1, 2, 3, 4, 5, 7, 6}),
               "operation 6 \\(send\\) was moved across another message");
}

}  // namespace
}  // namespace troupe
