// Autodiff: which gradient operations it asks for, where their results go and how they are summed.
// The numbers themselves are checked for every operation by the conformance tests of tests/ops.
#include "passes/autodiff.h"

#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/exchange/gather_parameter/gather_parameter.h"
#include "passes/inference_programs.h"
#include "passes/step_programs.h"
#include "program/test_models.h"
#include "program/toy_operations.h"
#include "program/verify.h"

namespace troupe {
namespace {

using namespace testing;

class Autodiff : public ::testing::Test {
 protected:
  ValueId weight(int i) { return builder.state(state.parameters[static_cast<size_t>(i)]); }
  // Differentiates everything emitted so far; each seed enters as a new "seed" tensor.
  IdVector<ValueId, ValueId> differentiate(const std::vector<ValueId>& outputs,
                                           const std::vector<ValueId>& differentiable_inputs = {}) {
    std::vector<GradientSeed> seeds;
    const int32_t last = program.op_count();
    for (const ValueId output : outputs) {
      const ValueId seed = builder.input("seed", DType::f32, builder.value(output).shape);
      seeds.push_back({output, seed});
      seed_values.push_back(seed);
    }
    backward_begin = last;
    auto gradients =
        append_backward(builder, 0, last, seeds, differentiable_inputs, main_gradients);
    verify_program(program);
    return gradients;
  }
  // The gradient operations of one kind, in order.
  std::vector<int32_t> backward_ops(const OpSpec& spec) const {
    std::vector<int32_t> ops;
    for (int32_t i = backward_begin; i < program.op_count(); ++i) {
      if (program.op(i).spec == &spec) ops.push_back(i);
    }
    return ops;
  }
  bool accumulates(int32_t op) const {
    return program.op(op).attributes.as<ToyAccumulate>().accumulate;
  }
  ValueId output_of(int32_t op) const { return program.outputs(program.op(op))[0]; }
  ValueId input_of(int32_t op, size_t i) const { return program.inputs(program.op(op))[i]; }

  ToyState state = make_toy_state(2);
  Program program{state.table};
  Builder builder{program};
  MainGradients main_gradients{*state.table};
  std::vector<ValueId> seed_values;
  int32_t backward_begin = 0;
};
using AutodiffDeathTest = Autodiff;

TEST_F(Autodiff, TiedWeightIsStoredThenAccumulated) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  const ValueId y = toy_scale(builder, x, weight(0), "y");
  const ValueId z = toy_scale(builder, y, weight(0), "z");
  differentiate({z});
  const auto ops = backward_ops(kToyScaleWeightGradient);
  ASSERT_EQ(ops.size(), 2U);
  EXPECT_FALSE(accumulates(ops[0])) << "the first one of the step overwrites the last step's";
  EXPECT_TRUE(accumulates(ops[1]));
  for (const int32_t op : ops) {
    EXPECT_EQ(output_of(op), builder.state(state.gradients[0])) << "written in place";
  }
  EXPECT_TRUE(main_gradients.written[state.gradients[0]]);
  EXPECT_FALSE(main_gradients.written[state.gradients[1]]);
}

// What makes only the terms of a sum into a main gradient may be put off like the sum. What others
// read, too, is a data gradient, though it is a term of such a sum.
TEST_F(Autodiff, TermsOfSumsAreWeightGradientsWhereNothingElseReadsThem) {
  const GatherParameterAttributes half{.shard = {.place = 0, .count = 2}, .shape = {8}};
  const ValueId frozen = builder.state(state.frozen);
  const ValueId x = builder.input("x", DType::f32, {8});
  const ValueId added = gather_parameter(builder, weight(0), half, "added");
  const ValueId y = add(builder, toy_scale(builder, x, frozen, "scaled"), added, "y");
  const ValueId z = toy_scale(builder, y, frozen, "z");
  const ValueId alone = gather_parameter(builder, weight(1), half, "alone");
  const ValueId w = toy_scale(builder, alone, frozen, "w");
  const auto gradients = differentiate({z, w}, {x});
  ASSERT_TRUE(gradients[x].valid());
  const auto phase_of_maker = [&](ValueId id) {
    for (const int32_t op : backward_ops(kToyScaleDataGradient)) {
      if (output_of(op) == id) return program.op(op).place.phase;
    }
    return Phase::forward;
  };
  const auto sums = backward_ops(kSumParameterGradient);
  ASSERT_EQ(sums.size(), 2U);
  EXPECT_EQ(phase_of_maker(input_of(sums[0], 0)), Phase::weight_gradient)
      << "read by the sum alone";
  EXPECT_EQ(phase_of_maker(input_of(sums[1], 0)), Phase::data_gradient) << "x's gradient reads it";
}

TEST_F(Autodiff, LaterMicroBatchesAccumulate) {
  for (int32_t micro_batch = 0; micro_batch < 3; ++micro_batch) {
    builder.place = {.micro_batch = micro_batch};
    const int32_t first = program.op_count();
    const ValueId x = builder.input("x", DType::f32, {2, 4});
    const ValueId y = toy_scale(builder, x, weight(0), "y");
    const ValueId seed = builder.input("seed", DType::f32, {2, 4});
    const std::vector<GradientSeed> seeds = {{y, seed}};
    append_backward(builder, first, program.op_count(), seeds, {}, main_gradients);
  }
  const auto ops = backward_ops(kToyScaleWeightGradient);
  ASSERT_EQ(ops.size(), 3U);
  EXPECT_FALSE(accumulates(ops[0]));
  EXPECT_TRUE(accumulates(ops[1]));
  EXPECT_TRUE(accumulates(ops[2]));
}

TEST_F(Autodiff, GradientsOfSeveralPathsAreSummed) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  const ValueId a = toy_halve(builder, x, "a");
  const ValueId b = toy_halve(builder, x, "b");
  const ValueId c = toy_halve(builder, x, "c");
  const auto gradients = differentiate({a, b, c}, {x});
  // Paths are met from the last operation to the first: ((c + b) + a).
  const auto halves = backward_ops(kToyHalve);
  const auto sums = backward_ops(kAdd);
  ASSERT_EQ(halves.size(), 3U);
  ASSERT_EQ(sums.size(), 2U);
  EXPECT_EQ(input_of(halves[0], 0), seed_values[2]);
  EXPECT_EQ(input_of(sums[0], 0), output_of(halves[0]));
  EXPECT_EQ(input_of(sums[0], 1), output_of(halves[1]));
  EXPECT_EQ(input_of(sums[1], 0), output_of(sums[0]));
  EXPECT_EQ(input_of(sums[1], 1), output_of(halves[2]));
  EXPECT_EQ(gradients[x], output_of(sums[1]));
}

TEST_F(Autodiff, ASeedIsSummedWithWhatArrivesFromBehind) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  const ValueId y = toy_halve(builder, x, "y");
  const ValueId z = toy_halve(builder, y, "z");
  const auto gradients = differentiate({y, z}, {x});
  const auto sums = backward_ops(kAdd);
  ASSERT_EQ(sums.size(), 1U);
  EXPECT_EQ(input_of(sums[0], 0), seed_values[0]);
  EXPECT_EQ(gradients[y], output_of(sums[0]));
}

TEST_F(Autodiff, NoGradientOfAConstant) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  const ValueId y = toy_scale(builder, x, weight(0), "y");
  const auto gradients = differentiate({y});
  EXPECT_TRUE(backward_ops(kToyScaleDataGradient).empty()) << "x needs no gradient";
  EXPECT_EQ(backward_ops(kToyScaleWeightGradient).size(), 1U);
  EXPECT_FALSE(gradients[x].valid());
}

TEST_F(Autodiff, NoGradientOfAFrozenParameter) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  const ValueId y = toy_scale(builder, x, builder.state(state.frozen), "y");
  differentiate({y}, {x});
  EXPECT_TRUE(backward_ops(kToyScaleWeightGradient).empty());
  EXPECT_EQ(backward_ops(kToyScaleDataGradient).size(), 1U);
}

TEST_F(Autodiff, NothingIsEmittedWhereNothingIsWanted) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  const ValueId before = toy_halve(builder, x, "before");
  const ValueId y = toy_scale(builder, before, weight(0), "y");
  const ValueId unused = toy_scale(builder, y, weight(1), "unused");
  differentiate({y});
  EXPECT_EQ(program.op_count() - backward_begin, 1) << "only the gradient of the weight of y";
  EXPECT_EQ(output_of(backward_begin), builder.state(state.gradients[0]));
  EXPECT_FALSE(main_gradients.written[state.gradients[1]])
      << builder.value(unused).name << " does not reach the loss";
}

TEST_F(Autodiff, StopsAtOperationsWithoutDerivative) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  const ValueId y = toy_scale(builder, x, weight(0), "y");
  const ValueId mixed = toy_mix(builder, y, y, "mixed")[0];
  const ValueId z = toy_scale(builder, mixed, weight(1), "z");
  const auto gradients = differentiate({z});
  EXPECT_FALSE(gradients[y].valid());
  EXPECT_EQ(program.op_count() - backward_begin, 1) << "only the gradient of the second weight";
}

TEST_F(Autodiff, PlacesAreThoseOfTheForwardOperation) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  builder.place = {.layer = 3, .micro_batch = 5};
  const ValueId y = toy_scale(builder, x, weight(0), "y");
  builder.place = {.layer = 4, .micro_batch = 5};
  differentiate({y}, {x});
  for (const auto& [spec, phase] : {std::pair{&kToyScaleDataGradient, Phase::data_gradient},
                                    std::pair{&kToyScaleWeightGradient, Phase::weight_gradient}}) {
    const auto ops = backward_ops(*spec);
    ASSERT_EQ(ops.size(), 1U);
    EXPECT_EQ(program.op(ops[0]).place.phase, phase);
    EXPECT_EQ(program.op(ops[0]).place.layer, 3);
    EXPECT_EQ(program.op(ops[0]).place.micro_batch, 5);
  }
  EXPECT_EQ(builder.place.layer, 4) << "the caller's place is restored";
  EXPECT_EQ(builder.place.phase, Phase::forward);
}

TEST_F(AutodiffDeathTest, ASeedHasTheShapeOfItsValue) {
  const ValueId x = builder.input("x", DType::f32, {2, 4});
  const ValueId y = toy_halve(builder, x, "y");
  const ValueId seed = builder.input("seed", DType::f32, {3, 4});
  const std::vector<GradientSeed> seeds = {{y, seed}};
  EXPECT_DEATH(append_backward(builder, 0, 1, seeds, {}, main_gradients),
               "a seed has the shape of its value: y");
}

// Whole models.
class ModelAutodiff : public ::testing::TestWithParam<std::string> {
 protected:
  ModelConfig config = GetParam() == "dense" ? dense_model(3) : moe_model(3);
  ModelState state = declare_model_state(config, DType::f32, /*trained=*/true);
  TrainingStep step = build_training_step(
      config, state, {.micro_batch_size = 1, .micro_batches = 2, .sequence = 16});
  const Program& program = *step.program;
};

TEST_P(ModelAutodiff, EveryMainGradientIsWrittenInEveryMicroBatchByWeightGradientOperations) {
  std::map<int32_t, std::set<int32_t>> micro_batches_of;  // by StateId
  for (int32_t i = 0; i < program.op_count(); ++i) {
    const Op& op = program.op(i);
    for (const ValueId output : program.outputs(op)) {
      const Value& value = program.value(output);
      if (value.role != Role::gradient) continue;
      EXPECT_EQ(op.place.phase, Phase::weight_gradient) << value.name;
      micro_batches_of[value.state.index].insert(op.place.micro_batch);
    }
  }
  for (const Parameter& parameter : state.parameters) {
    EXPECT_EQ(micro_batches_of[parameter.gradient.index], (std::set<int32_t>{0, 1}))
        << (*state.table)[parameter.value].name;
  }
}

TEST_P(ModelAutodiff, BackwardDefinesNothingUnused) {
  // Every activation that a gradient operation defines is read by a later operation, at least one
  // of its outputs when it has several.
  std::vector<bool> read(static_cast<size_t>(program.value_count()), false);
  for (int32_t i = program.op_count() - 1; i >= 0; --i) {
    const Op& op = program.op(i);
    bool used = false;
    for (const ValueId output : program.outputs(op)) {
      used = used || read[static_cast<size_t>(output.index)] ||
             is_persistent(program.value(output).role);
    }
    if (op.place.phase == Phase::data_gradient) {
      EXPECT_TRUE(used) << "operation " << i << " (" << op.spec->name << ")";
    }
    for (const ValueId input : program.inputs(op)) {
      if (input.valid()) read[static_cast<size_t>(input.index)] = true;
    }
  }
}

TEST_P(ModelAutodiff, ForwardIsNotChanged) {
  int32_t forward = 0;
  for (int32_t i = 0; i < program.op_count(); ++i) {
    forward += program.op(i).place.phase == Phase::forward && program.op(i).place.layer == 1 &&
               program.op(i).place.micro_batch == 1;
  }
  const InferenceStep inference = build_logits_step(config, state, 1, 16, /*with_loss=*/true);
  int32_t expected = 0;
  for (int32_t i = 0; i < inference.program->op_count(); ++i) {
    expected += inference.program->op(i).place.layer == 1;
  }
  // In training, a MoE layer also has its two auxiliary losses, and three metrics: both losses and
  // the experts' loads (counted and accumulated) and the router entropy.
  EXPECT_EQ(forward, expected + (config.is_moe_layer(1) ? 7 : 0));
}

INSTANTIATE_TEST_SUITE_P(Models, ModelAutodiff, ::testing::Values("dense", "moe"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace troupe
