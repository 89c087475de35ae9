// Histories of largest elements: what quantisation takes from them, and how a step moves them. (The
// generic tests cannot run the update: it changes state.)
#include "ops/precision/amax_history/amax_history.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <vector>

#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"
#include "value_test_support.h"

namespace troupe::testing {
namespace {

using Floats = std::vector<float>;

std::vector<std::vector<double>> delayed(const std::vector<double>& history,
                                         const DelayedAmaxAttributes& attributes) {
  return run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    constant.dtype = DType::f32;
    const auto matrices = static_cast<int64_t>(history.size()) / 6;
    const ValueId values =
        sample.values("history", {matrices, kHistoryKinds, 2}, history, constant);
    for (const ValueId amax : delayed_amax(sample.builder(), values, attributes)) {
      sample.result_without_gradient(amax);
    }
  });
}

TEST(AmaxHistory, GivesTheNewestOrTheLargestOfEachOperand) {
  const std::vector<double> history = {1, 2, 0.5, 0.25, 0, 3};
  const std::vector<std::vector<double>> newest = {{1}, {0.5}, {0}};
  EXPECT_EQ(delayed(history, {}), newest);
  const std::vector<std::vector<double>> largest = {{8}, {2}, {12}};
  EXPECT_EQ(delayed(history, {.most_recent = false, .factor = 4}), largest);
}

TEST(AmaxHistory, IsOfEachExpert) {
  const std::vector<std::vector<double>> expected = {{1, 7}, {3, 9}, {5, 11}};
  EXPECT_EQ(delayed({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {.experts = true}), expected);
}

// The history after a step in which two ranks measured `forward` and `backward`, two rows each.
Floats update(const Floats& history, const std::vector<double>& forward,
              const std::vector<double>& backward, int32_t skip = 0) {
  auto table = std::make_shared<StateTable>();
  const auto steps = static_cast<int64_t>(history.size()) / kHistoryKinds;
  const StateId state = table->add({.name = "history",
                                    .dtype = DType::f32,
                                    .shape = {1, kHistoryKinds, steps},
                                    .role = Role::optimizer});
  Program program(table);
  Builder builder(program);
  const auto parts = [&](const char* name, const std::vector<double>& values) {
    return builder.input(name, DType::f64, {2, static_cast<int64_t>(values.size()) / 2});
  };
  const ValueId history_id = builder.state(state);
  const ValueId forward_id = parts("forward", forward);
  const ValueId backward_id = parts("backward", backward);
  const ValueId skip_id = builder.input("skip", DType::i32, {1});
  amax_history_update(builder, history_id, forward_id, backward_id, skip_id, {.column = {1, 0, 1}});
  verify_program(program);
  ThreadPool pool(1);
  StateStorage storage(table);
  CpuInterpreter interpreter(program, plan_memory(program, 1), storage, pool);
  auto* data = interpreter.view(history_id).as<float>();
  std::copy(history.begin(), history.end(), data);
  std::copy(forward.begin(), forward.end(), interpreter.view(forward_id).as<double>());
  std::copy(backward.begin(), backward.end(), interpreter.view(backward_id).as<double>());
  *interpreter.view(skip_id).as<int32_t>() = skip;
  interpreter.run();
  return {data, data + history.size()};
}

TEST(AmaxHistory, BeginsWithTheLargestOfAllRanks) {
  // Of the input column 1, of the weight column 0; of the gradient column 1.
  EXPECT_EQ(update({1, 2, 3, 4, 5, 6}, {10, 20, 30, 15}, {99, 7, 99, 8}),
            (Floats{20, 1, 30, 3, 8, 5}));
  EXPECT_EQ(update({1, 2, 3}, {10, 20, 30, 15}, {99, 7, 99, 8}), (Floats{20, 30, 8}));
}

TEST(AmaxHistory, StaysWhereAStepHadNothingOrNoNumber) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  EXPECT_EQ(update({1, 2, 3, 4, 5, 6}, {10, 0, 30, 0}, {0, 7, 0, kInfinite}),
            (Floats{1, 2, 30, 3, 5, 6}));
}

TEST(AmaxHistory, StaysInASkippedStep) {
  EXPECT_EQ(update({1, 2, 3}, {10, 20, 30, 15}, {99, 7, 99, 8}, 1), (Floats{1, 2, 3}));
}

}  // namespace
}  // namespace troupe::testing
