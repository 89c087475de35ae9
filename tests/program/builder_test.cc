// Builder: values and operations come out as their rules and the caller's place say.
#include "program/builder.h"

#include <gtest/gtest.h>

#include "program/toy_operations.h"

namespace troupe {
namespace {

using namespace testing;

TEST(Builder, NamesTheFirstOutputAndSuffixesTheOthers) {
  Program program(make_toy_state(0).table);
  Builder builder(program);
  const ValueId a = toy_make(builder, 2, "a");
  const auto outputs = toy_mix(builder, a, a, "sum");
  ASSERT_EQ(outputs.size(), 2U);
  EXPECT_EQ(builder.value(outputs[0]).name, "sum");
  EXPECT_EQ(builder.value(outputs[1]).name, "sum.difference");
  EXPECT_EQ(builder.value(outputs[0]).shape, Shape({2, 4}));
  EXPECT_EQ(builder.value(outputs[0]).role, Role::activation);
}

TEST(Builder, StampsThePlace) {
  Program program(make_toy_state(0).table);
  Builder builder(program);
  builder.place = {.phase = Phase::recompute, .layer = 3, .micro_batch = 7};
  toy_make(builder, 1, "a");
  const Place& place = program.op(0).place;
  EXPECT_EQ(place.phase, Phase::recompute);
  EXPECT_EQ(place.layer, 3);
  EXPECT_EQ(place.micro_batch, 7);
}

TEST(Builder, KeepsAbsentOptionalInputs) {
  Program program(make_toy_state(0).table);
  Builder builder(program);
  const ValueId a = toy_make(builder, 1, "a");
  toy_mix(builder, a, a, "sum");
  const auto inputs = program.inputs(program.op(1));
  ASSERT_EQ(inputs.size(), 3U);
  EXPECT_FALSE(inputs[2].valid());
  EXPECT_FALSE((OpView{program, program.op(1)}.has_input(2)));
}

TEST(Builder, BooksTheWorkspace) {
  const ToyState state = make_toy_state(1);
  Program program(state.table);
  Builder builder(program);
  const ValueId x = toy_make(builder, 5, "x");
  builder.emit(kToyScaleWeightGradient, Attributes(ToyAccumulate{}),
               {x, x, builder.state(state.gradients[0])}, "dw");
  const Op& op = program.op(1);
  ASSERT_TRUE(op.workspace.valid());
  EXPECT_EQ(program.value(op.workspace).role, Role::workspace);
  EXPECT_EQ(program.value(op.workspace).bytes(), builder.value(x).bytes());
  EXPECT_FALSE(program.op(0).workspace.valid()) << "make() has no workspace";
}

TEST(Builder, StateIsOneValueInAProgram) {
  const ToyState state = make_toy_state(2);
  Program program(state.table);
  Builder builder(program);
  EXPECT_FALSE(program.find_state_value(state.parameters[1]).valid());
  const ValueId w = builder.state(state.parameters[1]);
  EXPECT_EQ(w, builder.state(state.parameters[1]));
  EXPECT_EQ(w, program.find_state_value(state.parameters[1]));
  EXPECT_EQ(program.value(w).state, state.parameters[1]);
  EXPECT_EQ(program.value(w).name, "layers.1.w");
}

TEST(Builder, SelectOpsReordersAndRemoves) {
  Program program(make_toy_state(0).table);
  Builder builder(program);
  const ValueId a = toy_make(builder, 1, "a");
  toy_make(builder, 2, "b");
  toy_halve(builder, a, "c");
  program.select_ops(std::vector<int32_t>{0, 2});
  ASSERT_EQ(program.op_count(), 2);
  EXPECT_EQ(program.op(1).spec, &kToyHalve);
  EXPECT_EQ(program.inputs(program.op(1))[0], a);
}

TEST(Builder, SelectOpsRenumbersWhatIsRecomputed) {
  Program program(make_toy_state(0).table);
  Builder builder(program);
  for (const int32_t original : {-1, -1, 0, 1}) {
    builder.place.recompute_of = original;
    toy_make(builder, 1, "a");
  }
  program.select_ops(std::vector<int32_t>{0, 1, 3, 2});
  EXPECT_EQ(program.op(0).place.recompute_of, -1);
  EXPECT_EQ(program.op(2).place.recompute_of, 1);
  EXPECT_EQ(program.op(3).place.recompute_of, 0);
}

TEST(BuilderDeathTest, RefusesWhatRulesForbid) {
  const ToyState state = make_toy_state(1);
  Program program(state.table);
  Builder builder(program);
  const ValueId a = toy_make(builder, 1, "a");
  const ValueId b = toy_make(builder, 2, "b");
  EXPECT_DEATH(toy_mix(builder, a, b, "sum"), "mix of different shapes");
  EXPECT_DEATH(toy_halve(builder, ValueId{1000}, "c"),
               "halve refers to a value that does not exist");
  EXPECT_DEATH(toy_collect(builder, a, b, false), "cannot be changed in place: a");
  const auto read_as_another_kind = [&] {
    return OpView{program, program.op(0)}.attributes<ToyAccumulate>().accumulate;
  };
  EXPECT_DEATH(read_as_another_kind(), "attributes read as another operation's");
}

TEST(BuilderDeathTest, WeightGradientsHaveTheTargetsType) {
  auto table = std::make_shared<StateTable>();
  const StateId wrong_shape =
      table->add({.name = "grad.a", .dtype = DType::f32, .shape = {5}, .role = Role::gradient});
  const StateId wrong_dtype =
      table->add({.name = "grad.b", .dtype = DType::f64, .shape = {4}, .role = Role::gradient});
  Program program(table);
  Builder builder(program);
  const ValueId x = toy_make(builder, 1, "x");
  const auto emit = [&](StateId target) {
    builder.emit(kToyScaleWeightGradient, Attributes(ToyAccumulate{}),
                 {x, x, builder.state(target)}, "dw");
  };
  EXPECT_DEATH(emit(wrong_shape), "weight gradient of another shape: grad.a");
  EXPECT_DEATH(emit(wrong_dtype),
               "weight gradients have the weight.s dtype or its accumulation dtype: grad.b");
}

}  // namespace
}  // namespace troupe
