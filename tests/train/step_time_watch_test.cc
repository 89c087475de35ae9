// When a run is called slow, and where its time is said to go.
#include "train/step_time_watch.h"

#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

namespace troupe {
namespace {

StepMetrics step_of(double seconds, double planned = 1) {
  StepMetrics metrics;
  metrics.step_time_s = seconds;
  metrics.planned_step_time_s = planned;
  return metrics;
}

void add(StepTimeWatch& watch, size_t steps, const StepMetrics& metrics) {
  for (size_t i = 0; i < steps; ++i) watch.add(metrics);
}

constexpr size_t kEnough = StepTimeWatch::kSteps + StepTimeWatch::kFirst;

TEST(StepTimeWatch, IsSlowAboveTheFactorOnceThereAreEnoughSteps) {
  StepTimeWatch watch;
  add(watch, kEnough - 1, step_of(1.21));
  EXPECT_FALSE(watch.is_slow()) << "the median is of fewer steps";
  watch.add(step_of(1.21));
  EXPECT_TRUE(watch.is_slow());
  EXPECT_EQ(watch.seconds(), 1.21);
  watch.say_no_more();
  EXPECT_FALSE(watch.is_slow());
}

TEST(StepTimeWatch, IsNotSlowAtTheFactor) {
  StepTimeWatch watch;
  add(watch, kEnough, step_of(1.2));
  EXPECT_FALSE(watch.is_slow());
}

TEST(StepTimeWatch, FewSlowStepsMakeNoSlowRun) {
  StepTimeWatch watch;
  add(watch, StepTimeWatch::kFirst, step_of(100));  // the first ones do not count
  add(watch, 9, step_of(50));
  add(watch, 11, step_of(1));
  EXPECT_FALSE(watch.is_slow());
  add(watch, 20, step_of(1.3));
  EXPECT_TRUE(watch.is_slow()) << "the last twenty count";
}

// The 11th of 20, whatever their order; the first of 21 is forgotten.
TEST(StepTimeWatch, TheMedianIsThatOfTheLastSteps) {
  StepTimeWatch watch;
  add(watch, StepTimeWatch::kFirst, step_of(1));
  constexpr int kSteps = StepTimeWatch::kSteps;
  for (int i = 0; i < kSteps; ++i) watch.add(step_of(100 + i * 7 % kSteps));
  EXPECT_EQ(watch.seconds(), 110);
  watch.add(step_of(300));  // 100 was the first
  EXPECT_EQ(watch.seconds(), 111);
  watch.add(step_of(300));  // and 107 the second
  EXPECT_EQ(watch.seconds(), 112);
}

TEST(StepTimeWatch, ComparesStepsOfOnePlanWithoutRounds) {
  StepTimeWatch watch;
  add(watch, kEnough, step_of(5, 0));
  EXPECT_FALSE(watch.is_slow()) << "there is no plan";
  StepMetrics in_rounds = step_of(5);
  in_rounds.rooms_lacked = 1;
  add(watch, kEnough, in_rounds);
  EXPECT_FALSE(watch.is_slow());
  add(watch, kEnough - 1, step_of(5, 1));
  watch.add(step_of(5, 4.9));
  EXPECT_FALSE(watch.is_slow()) << "a larger batch has begun";
  add(watch, kEnough, step_of(2, 1));
  EXPECT_TRUE(watch.is_slow());
  EXPECT_EQ(watch.planned(), 1);
}

TEST(StepTimeWatch, TheFirstStepsOfEachPlanDoNotCount) {
  StepTimeWatch watch;
  add(watch, kEnough, step_of(1, 1));
  add(watch, kEnough - 1, step_of(9, 2));
  EXPECT_FALSE(watch.is_slow());
  EXPECT_EQ(watch.planned(), 2);
  watch.add(step_of(9, 2));
  EXPECT_TRUE(watch.is_slow());
}

TEST(StepTimeWatch, TheMedianIsTheLargerOfTwo) {
  StepTimeWatch watch;
  add(watch, StepTimeWatch::kFirst, step_of(1));
  for (int i = 1; i <= 21; ++i) watch.add(step_of(i));
  EXPECT_EQ(watch.seconds(), 12) << "of 2 to 21";
}

PlannedTime planned() {
  return {.seconds = 1,
          .hardware = "a GPU",
          .of_kinds = {{"linear", 0.5}, {"attention", 0.3}, {"adamw", 0.1}}};
}

KindTime kind(const std::string& name, double seconds) {
  KindTime time;
  time.kind = name;
  time.seconds = seconds;
  return time;
}

SeenStep seen(std::vector<KindTime> kinds, double seconds, double busy) {
  StepTimes times;
  times.seconds = seconds;
  times.busy_s = busy;
  return {.kinds = std::move(kinds), .times = times};
}

TEST(SlowSteps, TheLargestExcessComesFirst) {
  const std::string text = describe_slow_steps(40, 1.5, planned(),
                                               seen({kind("linear", 0.6), kind("attention", 0.55),
                                                     kind("adamw", 0.11), kind("permute", 0.03)},
                                                    1.45, 1.3));
  EXPECT_EQ(text,
            "Warning: step 40: the last 20 steps took 1.50 s each (median), 50 % more than the "
            "1.00 s planned for a GPU. On rank 0: attention 550.0 ms instead of 300.0 ms, between "
            "operations 150.0 ms, linear 600.0 ms instead of 500.0 ms, permute 30.0 ms instead of "
            "0.0 ms.");
}

// Of equal ones those that come first; one of a fiftieth of the step is not worth naming.
TEST(SlowSteps, FourAreNamed) {
  const auto described = [](std::vector<KindTime> kinds) {
    const std::string text = describe_slow_steps(40, 1.5, planned(), seen(std::move(kinds), 1, 1));
    return text.substr(text.find("On rank 0: "));
  };
  EXPECT_EQ(described({kind("a", 0.25), kind("b", 0.25), kind("c", 0.25), kind("d", 0.5),
                       kind("e", 0.25)}),
            "On rank 0: d 500.0 ms instead of 0.0 ms, a 250.0 ms instead of 0.0 ms, b 250.0 ms "
            "instead of 0.0 ms, c 250.0 ms instead of 0.0 ms.");
  EXPECT_EQ(described({kind("a", 0.02), kind("b", 0.0201)}),
            "On rank 0: b 20.1 ms instead of 0.0 ms.");
}

TEST(SlowSteps, WhatIsAsPlannedIsNotNamed) {
  const std::string text =
      describe_slow_steps(40, 1.5, planned(), seen({kind("linear", 0.51)}, 1, 1));
  EXPECT_TRUE(text.ends_with("On rank 0: no kind of operation stands out.")) << text;
}

// Four are named at most, each of more than 2 % of what is planned.
TEST(SlowSteps, FewAreNamedAndOfThoseThatMatter) {
  const auto named = [](const std::vector<KindTime>& kinds, double idle) {
    const std::string text = describe_slow_steps(9, 2, planned(), seen(kinds, 1 + idle, 1));
    return text.substr(text.find("On rank 0: "));
  };
  EXPECT_EQ(named({kind("a", 0.02), kind("b", 0.03125), kind("c", 0.0625), kind("d", 0.09375)}, 0),
            "On rank 0: d 93.8 ms instead of 0.0 ms, c 62.5 ms instead of 0.0 ms, b 31.2 ms "
            "instead of 0.0 ms.");
  EXPECT_EQ(named({kind("b", 0.03125), kind("c", 0.0625), kind("d", 0.09375)}, 0.25),
            "On rank 0: between operations 250.0 ms, d 93.8 ms instead of 0.0 ms, c 62.5 ms "
            "instead of 0.0 ms, b 31.2 ms instead of 0.0 ms.");
  EXPECT_EQ(
      named({kind("b", 0.03125), kind("c", 0.0625), kind("d", 0.09375), kind("e", 0.5)}, 0.25),
      "On rank 0: e 500.0 ms instead of 0.0 ms, between operations 250.0 ms, d 93.8 ms "
      "instead of 0.0 ms, c 62.5 ms instead of 0.0 ms.");
}

TEST(SlowSteps, WithoutALookTheFlagIsNamed) {
  const std::string text = describe_slow_steps(40, 1.5, planned(), std::nullopt);
  EXPECT_TRUE(text.ends_with("--profile shows which operations take longer.")) << text;
}

}  // namespace
}  // namespace troupe
