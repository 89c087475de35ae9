// Printer: golden texts of a program made by hand and of a tiny training step. The golden files
// document what a training step consists of; golden.h says how to write them anew.
#include "plan/print.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <regex>
#include <sstream>
#include <string>

#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "plan/memory_chart.h"
#include "program/golden.h"
#include "program/test_models.h"
#include "program/toy_operations.h"
#include "program/verify.h"

namespace troupe {
namespace {

using namespace testing;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Shows every form of statement and of name: several outputs, ragged rows, absent inputs, changes
// in place, workspace, names that occur in several blocks and several times in one.
std::unique_ptr<Program> make_hand_made_program(const ToyState& state) {
  auto program = std::make_unique<Program>(state.table);
  Builder builder(*program);
  const ValueId mean = builder.metric("mean", DType::f32, {1});
  const ValueId table = toy_make(builder, 2, "table");
  for (int32_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
    builder.place = {.layer = -1, .micro_batch = micro_batch};
    const ValueId tokens = builder.input("tokens", DType::f32, {2, 4});
    ValueId x = toy_mix(builder, tokens, table, "x")[0];
    ValueId first_y;
    for (int16_t layer = 0; layer < 2; ++layer) {
      builder.place.layer = layer;
      const StateId w = state.parameters[static_cast<size_t>(layer)];
      const ValueId y = toy_scale(builder, x, builder.state(w), "y");
      x = toy_mix(builder, y, layer == 0 ? x : first_y, "out")[0];
      if (layer == 0) first_y = y;
    }
    const ValueId counts = builder.emit(kToyCount, Attributes(NoAttributes()), {x}, "counts")[0];
    const ValueId rows =
        builder.emit(kToyChoose, Attributes(NoAttributes()), {x, counts}, "rows")[0];
    toy_halve(builder, toy_halve(builder, rows, "half"), "half");

    builder.place.layer = -1;
    toy_collect(builder, mean, x, micro_batch > 0);
    builder.place = {.phase = Phase::weight_gradient, .layer = 0, .micro_batch = micro_batch};
    builder.emit(kToyScaleWeightGradient, Attributes(ToyAccumulate{.accumulate = micro_batch > 0}),
                 {x, first_y, builder.state(state.gradients[0])}, "dw");
  }
  builder.place = {.phase = Phase::optimizer, .queue = Queue::communication, .layer = 1};
  builder.emit(kToyHalve, Attributes(NoAttributes()), {builder.state(state.gradients[1])}, "half");
  return program;
}

TEST(Print, HandMadeProgram) {
  const ToyState state = make_toy_state(2);
  const auto program = make_hand_made_program(state);
  verify_program(*program);
  expect_golden(print_program(*program, {}), "hand_made_program.txt");
}

TEST(Print, FiltersKeepNumbersAndNames) {
  const ToyState state = make_toy_state(2);
  const auto program = make_hand_made_program(state);
  const std::string whole = print_program(*program, {});
  PrintOptions options;
  options.layer = 1;
  options.micro_batch = 1;
  const std::string part = print_program(*program, options);
  EXPECT_TRUE(contains(part, "scale(out@L0, w)")) << part;
  EXPECT_FALSE(contains(part, "mb0")) << part;
  EXPECT_FALSE(contains(part, " L0 ")) << part;
  EXPECT_TRUE(contains(whole, "scale(out@L0, w)")) << whole;

  options = {};
  options.phase = Phase::weight_gradient;
  EXPECT_TRUE(contains(print_program(*program, options), "# shown: 2 operations"));
}

// As wide as their largest numbers: of ten layers and micro-batches one digit, of eleven two.
TEST(Print, PlacesHaveTheWidthOfTheirNumbers) {
  for (const int16_t last : {9, 10}) {
    Program program(make_toy_state(0).table);
    Builder builder(program);
    builder.place = {.layer = last, .micro_batch = last};
    toy_make(builder, 2, "table");
    const std::string place = last == 9 ? " L9 mb9 " : " L10 mb10 ";
    EXPECT_TRUE(contains(print_program(program, {}), place)) << print_program(program, {});
  }
}

TEST(Print, LongListsOfInputsAreCut) {
  const ToyState state = make_toy_state(0);
  Program program(state.table);
  Builder builder(program);
  std::vector<ValueId> many;
  for (int i = 0; i < 20; ++i) many.push_back(toy_make(builder, 1, "t" + std::to_string(i)));
  builder.emit(kToyMix, Attributes(NoAttributes()), many, "sum");
  EXPECT_TRUE(contains(print_program(program, {}), "mix(t0, t1, t2, ... 16 more ..., t19)"))
      << print_program(program, {});
}

TEST(Print, ChartShowsThePeakAndThePhases) {
  const ToyState state = make_toy_state(2);
  const auto program = make_hand_made_program(state);
  std::vector<uint64_t> live(static_cast<size_t>(program->op_count()), 1024);
  live[3] = 4096;
  const std::string chart = draw_live_bytes(*program, live, 80);
  EXPECT_EQ(std::count(chart.begin(), chart.end(), '\n'), 12 + 3) << chart;
  EXPECT_TRUE(contains(chart, "4.00 KiB |   \u2588\n")) << chart;
  EXPECT_TRUE(contains(chart, "mb0")) << chart;
  EXPECT_TRUE(contains(chart, "mb1")) << chart;
}

TEST(PrintDeathTest, LiveBytesMustFitTheProgram) {
  const ToyState state = make_toy_state(2);
  const auto program = make_hand_made_program(state);
  PrintOptions options;
  const std::vector<uint64_t> live(3);
  options.live_bytes = live;
  EXPECT_DEATH(print_program(*program, options), "live bytes by operation");
}

// Where a kind has several kernels.
TEST(Print, NamesKernels) {
  const ToyState state = make_toy_state(2);
  const auto program = make_hand_made_program(state);
  std::vector<std::string> kernels;
  for (int32_t index = 0; index < program->op_count(); ++index) {
    kernels.emplace_back(index == 0 ? "packs" : program->op(index).spec->name);
  }
  PrintOptions options;
  options.kernels = kernels;
  const std::string text = print_program(*program, options);
  const size_t first = text.find(" by packs ");
  EXPECT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find(" by ", first + 1), std::string::npos) << text;
}

class PrintedStep : public ::testing::Test {
 protected:
  PrintedStep()
      : config(moe_model(2)),
        state(declare_model_state(config, DType::f32, /*trained=*/true)),
        step(build_training_step(config, state,
                                 {.micro_batch_size = 1, .micro_batches = 2, .sequence = 16})),
        plan(plan_memory(*step.program, /*threads=*/1)) {
    verify_program(*step.program);
    verify_memory_plan(*step.program, plan);
    options.live_bytes = plan.live_bytes;
    options.bytes_by_role = plan.bytes_by_role;
  }

  ModelConfig config;
  ModelState state;
  TrainingStep step;
  MemoryPlan plan;
  PrintOptions options;
};

TEST_F(PrintedStep, Whole) {
  const std::string text = print_program(*step.program, options);
  expect_golden(text + "\n" + draw_live_bytes(*step.program, plan.live_bytes, 84),
                "moe_training_step.txt");
}

TEST_F(PrintedStep, OneLayer) {
  options.layer = 1;
  expect_golden(print_program(*step.program, options), "moe_training_step_layer_1.txt");
}

TEST_F(PrintedStep, NoTwoDefinitionsLookAlike) {
  // Layer, micro-batch, and what stands left of "=".
  const std::regex definition(
      "^ *[0-9]+ +[a-z]+ +[a-z]+ +(L[0-9]+|-) +(mb[0-9]+|-) .*   ([^ ].*?) += .*");
  std::map<std::string, std::string> lines;
  std::istringstream text(print_program(*step.program, options));
  for (std::string line; std::getline(text, line);) {
    std::smatch match;
    if (!std::regex_match(line, match, definition)) continue;
    const std::string key = match[1].str() + " " + match[2].str() + " " + match[3].str();
    const auto [entry, is_new] = lines.emplace(key, line);
    EXPECT_TRUE(is_new) << entry->second << "\n" << line;
  }
  EXPECT_GT(lines.size(), 100U);
}

}  // namespace
}  // namespace troupe
