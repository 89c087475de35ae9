// Rewrites of finished programs: where inserted operations come to stand, what is dropped, and what
// operations read afterwards.
#include "program/rewrite.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"

namespace troupe {
namespace {

class RewriteTest : public ::testing::Test {
 protected:
  // 0: a, 1: b = a + a, 2: c = b + a
  RewriteTest() : program(std::make_shared<StateTable>()) {
    Builder builder(program);
    a = fill(builder, 1, DType::f64, {2}, "a");
    b = add(builder, a, a, "b");
    c = add(builder, b, a, "c");
  }

  ValueId insert_fill(Rewrite& rewrite, int32_t index, const std::string& name) {
    return rewrite.insert_before(index, Place{.layer = 7}, [&](Builder& builder) {
      return fill(builder, 2, DType::f64, {2}, name);
    });
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (int32_t i = 0; i < program.op_count(); ++i) {
      names.push_back(program.value(program.outputs(program.op(i)).front()).name);
    }
    return names;
  }

  Program program;
  ValueId a, b, c;
};

TEST_F(RewriteTest, InsertsInTheOrderOfTheCalls) {
  Rewrite rewrite(program);
  const ValueId x = insert_fill(rewrite, 2, "x");
  const ValueId y = insert_fill(rewrite, 0, "y");
  const ValueId z = insert_fill(rewrite, 2, "z");
  program.replace_read(2, b, x);
  program.replace_read(2, a, z);
  program.replace_read(1, a, y);
  program.select_ops(rewrite.order());
  EXPECT_EQ(names(), (std::vector<std::string>{"y", "a", "b", "x", "z", "c"}));
  EXPECT_EQ(program.op(3).place.layer, 7);
  EXPECT_EQ(program.op(5).place.layer, -1);
  const std::vector<int32_t> begins = {rewrite.new_begins()[0], rewrite.new_begins()[1],
                                       rewrite.new_begins()[2], rewrite.new_begins()[3]};
  EXPECT_EQ(begins, (std::vector<int32_t>{0, 2, 3, 6}));
}

TEST_F(RewriteTest, TakesOutWhatIsReplaced) {
  Rewrite rewrite(program);
  const ValueId x = insert_fill(rewrite, 1, "x");
  program.replace_read(2, b, x);
  rewrite.remove(1);
  program.select_ops(rewrite.order());
  EXPECT_EQ(names(), (std::vector<std::string>{"a", "x", "c"}));
  EXPECT_EQ(rewrite.new_begins()[1], 1);
  EXPECT_EQ(rewrite.new_begins()[2], 2);
  EXPECT_EQ(rewrite.new_begins()[3], 3);
}

TEST_F(RewriteTest, DropsWhatNothingReads) {
  Rewrite rewrite(program);
  const ValueId read = insert_fill(rewrite, 2, "read");
  const ValueId unread = insert_fill(rewrite, 1, "unread");
  rewrite.insert_before(2, Place{}, [&](Builder& builder) {
    return add(builder, unread, read, "reads_and_is_unread");
  });
  program.replace_read(2, b, read);
  program.select_ops(rewrite.order());
  EXPECT_EQ(names(), (std::vector<std::string>{"a", "b", "read", "c"}))
      << "what the program had stays, read or not";
  EXPECT_EQ(rewrite.new_begins()[2], 2);
  EXPECT_EQ(rewrite.new_begins()[3], 4);
}

TEST_F(RewriteTest, ReplacesEveryReadOfOneOperation) {
  program.replace_read(1, a, c);
  const auto inputs = [&](int32_t index) {
    const auto span = program.inputs(program.op(index));
    return std::vector<ValueId>(span.begin(), span.end());
  };
  EXPECT_EQ(inputs(1), (std::vector<ValueId>{c, c}));
  EXPECT_EQ(inputs(2), (std::vector<ValueId>{b, a}));
  EXPECT_EQ(program.outputs(program.op(1)).front(), b) << "outputs stay";
}

TEST_F(RewriteTest, RowsAreCountedByTheReplacement) {
  const ValueId counter = program.add_value(
      {.name = "counter", .dtype = DType::i32, .shape = {2}, .role = Role::input, .rows = {}});
  const ValueId other = program.add_value(
      {.name = "other", .dtype = DType::i32, .shape = {2}, .role = Role::input, .rows = {}});
  const auto ragged = [&](const std::string& name) {
    return program.add_value({.name = name,
                              .dtype = DType::f64,
                              .shape = {4, 2},
                              .role = Role::activation,
                              .rows = {.counter = counter, .element = 1}});
  };
  const ValueId x = ragged("x");
  const ValueId y = ragged("y");
  const ValueId z = ragged("z");
  const std::vector<ValueId> reads = {x};
  for (const ValueId result : {y, z}) {
    program.add_op(program.op(0), reads, std::vector<ValueId>{result});
  }
  program.replace_read(3, counter, other);
  EXPECT_EQ(program.value(y).rows.counter, other);
  EXPECT_EQ(program.value(y).rows.element, 1);
  EXPECT_EQ(program.value(z).rows.counter, counter) << "of another operation";
  EXPECT_EQ(program.value(x).rows.counter, counter) << "of an operand";
}

}  // namespace
}  // namespace troupe
