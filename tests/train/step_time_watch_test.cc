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

TEST(SlowSteps, WhatIsAsPlannedIsNotNamed) {
  const std::string text =
      describe_slow_steps(40, 1.5, planned(), seen({kind("linear", 0.51)}, 1, 1));
  EXPECT_TRUE(text.ends_with("On rank 0: no kind of operation stands out.")) << text;
}

TEST(SlowSteps, WithoutALookTheFlagIsNamed) {
  const std::string text = describe_slow_steps(40, 1.5, planned(), std::nullopt);
  EXPECT_TRUE(text.ends_with("--profile shows which operations take longer.")) << text;
}

}  // namespace
}  // namespace troupe
