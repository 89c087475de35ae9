// Verifier: a well-formed program passes; each broken invariant aborts and names the operation.
#include "program/verify.h"

#include <gtest/gtest.h>

#include "program/toy_operations.h"

namespace troupe {
namespace {

using namespace testing;

class Verify : public ::testing::Test {
 protected:
  // Appends an operation without the builder's checks.
  void append(const OpSpec& spec, const std::vector<ValueId>& inputs,
              const std::vector<ValueId>& outputs) {
    Op op;
    op.spec = &spec;
    op.attributes = Attributes(NoAttributes());
    program.add_op(op, inputs, outputs);
  }
  ValueId add_value(const std::string& name, DType dtype, const Shape& shape, RowCount rows = {}) {
    return program.add_value(Value{.name = name, .dtype = dtype, .shape = shape, .rows = rows});
  }

  ToyState state = make_toy_state(1);
  Program program{state.table};
  Builder builder{program};
};
using VerifyDeathTest = Verify;

TEST_F(Verify, AcceptsAWellFormedProgram) {
  const ValueId metric = builder.metric("mean", DType::f32, {1});
  const ValueId x = builder.input("x", DType::f32, {8, 4});
  const ValueId y = toy_scale(builder, x, builder.state(state.parameters[0]), "y");
  const ValueId counts = builder.emit(kToyCount, Attributes(NoAttributes()), {y}, "counts")[0];
  const ValueId z = builder.emit(kToyChoose, Attributes(NoAttributes()), {y, counts}, "z")[0];
  toy_halve(builder, z, "half");
  toy_collect(builder, metric, y, false);
  toy_collect(builder, metric, y, true);
  builder.emit(kToyScaleWeightGradient, Attributes(ToyAccumulate{}),
               {y, x, builder.state(state.gradients[0])}, "dw");
  verify_program(program);
}

TEST_F(VerifyDeathTest, UseBeforeDefinition) {
  const ValueId later = add_value("later", DType::f32, {2, 4});
  toy_halve(builder, later, "half");
  EXPECT_DEATH(verify_program(program),
               "operation 0 \\(halve\\) writing half uses later before it is defined");
}

TEST_F(VerifyDeathTest, UseBeforeDefinitionAfterReordering) {
  const ValueId a = toy_make(builder, 2, "a");
  toy_halve(builder, a, "half");
  program.select_ops(std::vector<int32_t>{1, 0});
  EXPECT_DEATH(verify_program(program), "operation 0 \\(halve\\).* uses a before it is defined");
}

TEST_F(VerifyDeathTest, MetricReadBeforeItIsWritten) {
  const ValueId metric = builder.metric("mean", DType::f32, {2, 4});
  toy_halve(builder, metric, "half");
  EXPECT_DEATH(verify_program(program), "uses mean before it is defined");
}

TEST_F(VerifyDeathTest, SecondDefinition) {
  const ValueId a = toy_make(builder, 2, "a");
  const ValueId half = toy_halve(builder, a, "half");
  append(kToyHalve, {a}, {half});
  EXPECT_DEATH(verify_program(program),
               "operation 2 \\(halve\\) writing half defines half a second time");
}

TEST_F(VerifyDeathTest, DefinitionOfAnInput) {
  const ValueId a = toy_make(builder, 2, "a");
  const ValueId tokens = builder.input("tokens", DType::f32, {2, 4});
  append(kToyHalve, {a}, {tokens});
  EXPECT_DEATH(verify_program(program), "defines tokens a second time");
}

TEST_F(VerifyDeathTest, ActivationChangedInPlace) {
  const ValueId a = toy_make(builder, 2, "a");
  append(kToyHalve, {a}, {a});
  EXPECT_DEATH(verify_program(program), "operation 1 \\(halve\\) writing a changes a in place");
}

TEST_F(VerifyDeathTest, WrongShape) {
  const ValueId a = toy_make(builder, 2, "a");
  append(kToyHalve, {a}, {add_value("half", DType::f32, {3, 4})});
  EXPECT_DEATH(verify_program(program), "half has another type than its rule says");
}

TEST_F(VerifyDeathTest, WrongDtype) {
  const ValueId a = toy_make(builder, 2, "a");
  append(kToyHalve, {a}, {add_value("half", DType::bf16, {2, 4})});
  EXPECT_DEATH(verify_program(program), "half has another type than its rule says");
}

TEST_F(VerifyDeathTest, RaggedWhereTheRuleSaysDense) {
  const ValueId a = toy_make(builder, 2, "a");
  const ValueId counts = builder.emit(kToyCount, Attributes(NoAttributes()), {a}, "counts")[0];
  append(kToyHalve, {a}, {add_value("half", DType::f32, {2, 4}, {counts, 0})});
  EXPECT_DEATH(verify_program(program), "half has another type than its rule says");
}

TEST_F(VerifyDeathTest, WrongNumberOfOutputs) {
  const ValueId a = toy_make(builder, 2, "a");
  append(kToyMix, {a, a, ValueId{}}, {add_value("sum", DType::f32, {2, 4})});
  EXPECT_DEATH(verify_program(program), "operation 1 \\(mix\\) writing sum: number of outputs");
}

TEST_F(VerifyDeathTest, MissingOutput) {
  const ValueId a = toy_make(builder, 2, "a");
  append(kToyHalve, {a}, {ValueId{}});
  EXPECT_DEATH(verify_program(program), "operation 1 \\(halve\\): an output is missing");
}

TEST_F(VerifyDeathTest, RowCounterOutOfRange) {
  const ValueId a = toy_make(builder, 2, "a");
  const ValueId counts = builder.emit(kToyCount, Attributes(NoAttributes()), {a}, "counts")[0];
  const ValueId ragged = add_value("ragged", DType::f32, {2, 4}, {counts, 3});
  append(kToyHalve, {a}, {ragged});
  EXPECT_DEATH(verify_program(program), "bad row counter of ragged");
}

TEST_F(VerifyDeathTest, RowCounterOfAnotherDtype) {
  const ValueId a = toy_make(builder, 2, "a");
  const ValueId ragged = add_value("ragged", DType::f32, {2, 4}, {a, 1});
  append(kToyHalve, {a}, {ragged});
  EXPECT_DEATH(verify_program(program), "bad row counter of ragged");
}

TEST_F(VerifyDeathTest, RowCounterUsedBeforeItIsDefined) {
  const ValueId counts = add_value("counts", DType::i32, {3});
  const ValueId ragged = program.add_value(Value{.name = "ragged",
                                                 .dtype = DType::f32,
                                                 .shape = {2, 4},
                                                 .role = Role::input,
                                                 .rows = {counts, 1}});
  toy_halve(builder, ragged, "half");
  EXPECT_DEATH(verify_program(program), "needs the row count of ragged before it is defined");
}

TEST_F(VerifyDeathTest, StateWithoutStateId) {
  const auto add = [&] {
    program.add_value(Value{.name = "w", .shape = {4}, .role = Role::parameter, .rows = {}});
  };
  EXPECT_DEATH(add(), "state and only state carries a StateId: w");
}

}  // namespace
}  // namespace troupe
