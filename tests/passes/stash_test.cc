// What the stash takes and when, in programs written by hand. Programs of models are in
// tests/layout/expert_room_test.cc.
#include "passes/stash.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/experts/row_stash/row_stash.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "program/builder.h"
#include "program/verify.h"

namespace troupe {
namespace {

constexpr int64_t kBound = 64;    // rows
constexpr int64_t kExpected = 8;  // of them
constexpr int64_t kColumns = 32;  // f64: a page of 256 bytes for each row

class StashPass : public ::testing::Test {
 protected:
  StashPass() : program(std::make_shared<StateTable>()), builder(program) {
    lacked = builder.metric("lacked", DType::f64, {1});
    most = builder.metric("most", DType::f64, {1});
    const ValueId none = fill(builder, 0, DType::f64, {1}, "none");
    for (const ValueId each : {lacked, most}) {
      accumulate(builder, each, none, 1, /*overwrite=*/true);
    }
    rows = builder.input("rows", DType::i32, {1});
  }

  static Place at(Phase phase, int16_t layer, int32_t micro_batch = 0) {
    return {.phase = phase, .layer = layer, .micro_batch = micro_batch};
  }

  // Ragged, of which kExpected rows are expected.
  ValueId input(const std::string& name) {
    return program.add_value({.name = name,
                              .dtype = DType::f64,
                              .shape = {kBound, kColumns},
                              .role = Role::input,
                              .rows = {.counter = rows, .expected = kExpected}});
  }
  ValueId sum(const std::string& name, const Place& place, ValueId a, ValueId b) {
    const PlaceScope scope(builder, place);
    return add(builder, a, b, name);
  }

  // A layer computes what its gradient reads.
  ValueId forward(int16_t layer, ValueId x, int32_t micro_batch = 0) {
    return sum("f" + std::to_string(layer), at(Phase::forward, layer, micro_batch), x, x);
  }
  ValueId backward(int16_t layer, ValueId kept, ValueId d, int32_t micro_batch = 0) {
    return sum("b" + std::to_string(layer), at(Phase::data_gradient, layer, micro_batch), kept, d);
  }

  // The names of what operations compute first, in their new order, without those of the fixture.
  std::string stashed(double factor = 1) {
    program.select_ops(
        stash_expert_rows(program, {.factor = factor, .page_bytes = 200}, lacked, most));
    verify_program(program);
    std::string text;
    for (int32_t index = 3; index < program.op_count(); ++index) {
      text += (text.empty() ? "" : " ") + program.value(program.outputs(program.op(index))[0]).name;
    }
    return text;
  }

  Program program;
  Builder builder;
  ValueId lacked;
  ValueId most;
  ValueId rows;
};

// What layer 1 keeps is used by layer 2 for the last time, with which the backward pass begins.
TEST_F(StashPass, TakesWhatWaitsWhileAnotherLayerWorks) {
  const ValueId f0 = forward(0, input("x"));
  const ValueId f1 = forward(1, f0);
  const ValueId f2 = forward(2, f1);
  backward(0, f0, backward(1, f1, backward(2, f2, f2)));
  EXPECT_EQ(stashed(), "f0 f1 stash f0_pages f2 b2 b1 f0 b0");
  EXPECT_EQ(stash_pages(program), kExpected);
}

// A page is a multiple of 256 bytes; the factor is of the pages that wait at a time, rounded up.
TEST_F(StashPass, HasPagesForTheFactorOfWhatWaitsAtATime) {
  ValueId x = input("x");
  std::vector<ValueId> kept;
  for (int16_t layer = 0; layer < 5; ++layer) kept.push_back(x = forward(layer, x));
  for (int16_t layer = 4; layer >= 0; --layer) {
    x = backward(layer, kept[static_cast<size_t>(layer)], x);
  }
  stashed(1.01);
  // Of layers 0 to 2; layer 3's is used by layer 4, with which the backward pass begins.
  EXPECT_EQ(stash_pages(program), 25);
}

// A second micro-batch begins before the backward pass of the first.
TEST_F(StashPass, TakesWhatMicroBatchesKeep) {
  const ValueId a = forward(0, input("x"), 0);
  const ValueId b = forward(0, input("y"), 1);
  backward(0, a, a, 0);
  backward(0, b, b, 1);
  EXPECT_EQ(stashed(), "f0 stash f0_pages f0 f0 b0 b0");
}

// Integers choose rows, what is not ragged is as large as it is, and what the backward pass makes
// does not wait.
TEST_F(StashPass, LeavesAllElse) {
  const ValueId dense = fill(builder, 1, DType::f64, {kBound, kColumns}, "dense");
  const ValueId f0 = sum("f0", at(Phase::forward, 0), dense, dense);
  const ValueId f1 = forward(1, input("x"));
  const ValueId d = backward(1, f1, f1);
  backward(0, f0, f0);
  sum("late", at(Phase::weight_gradient, 0), d, d);
  EXPECT_EQ(stashed(), "dense f0 f1 b1 b0 late");
  EXPECT_EQ(stash_pages(program), 0);
}

// All that read it after its first gradient do so where it is then.
TEST_F(StashPass, EveryLaterReaderReadsTheCopy) {
  const ValueId f0 = forward(0, input("x"));
  const ValueId f1 = forward(1, input("y"));
  const ValueId d = backward(1, f1, f1);
  backward(0, f0, d);
  sum("late", at(Phase::weight_gradient, 0), f0, d);
  EXPECT_EQ(stashed(), "f0 stash f0_pages f1 b1 f0 b0 late");
  const Op& unstashed = program.op(program.op_count() - 3);
  const Op& late = program.op(program.op_count() - 1);
  EXPECT_EQ(program.inputs(late)[0], program.outputs(unstashed)[0]);
  EXPECT_FALSE(program.inputs(late)[0] == f0);
}

}  // namespace
}  // namespace troupe
