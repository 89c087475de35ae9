// Learning-rate schedules against values worked out by hand from Megatron's formulas.
#include "train/learning_rate.h"

#include <cmath>
#include <gtest/gtest.h>
#include <numbers>

namespace troupe {
namespace {

LearningRateSchedule cosine() {
  return {.style = LrDecayStyle::cosine,
          .max_lr = 0.01,
          .min_lr = 0.001,
          .warmup_samples = 100,
          .decay_samples = 1100};
}

TEST(LearningRate, RisesLinearlyFromZero) {
  const LearningRateSchedule schedule = cosine();
  EXPECT_EQ(schedule.at(0), 0);
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.01 / 100);
  EXPECT_DOUBLE_EQ(schedule.at(25), 0.0025);
  EXPECT_DOUBLE_EQ(schedule.at(100), 0.01);
}

TEST(LearningRate, FallsAsACosine) {
  const LearningRateSchedule schedule = cosine();
  // min + (max - min) * (1 + cos(pi x)) / 2 at x = 1/4, 1/2, 3/4, 1 of the way.
  EXPECT_DOUBLE_EQ(schedule.at(350), 0.001 + 0.009 * 0.5 * (1 + std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(schedule.at(600), 0.0055);
  EXPECT_DOUBLE_EQ(schedule.at(850), 0.001 + 0.009 * 0.5 * (1 - std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(schedule.at(1100), 0.001);
}

TEST(LearningRate, StaysAtTheMinimumAfterTheDecay) {
  EXPECT_EQ(cosine().at(1101), 0.001);
  EXPECT_EQ(cosine().at(1'000'000'000'000), 0.001);
}

TEST(LearningRate, NeverRisesAfterTheWarmup) {
  const LearningRateSchedule schedule = cosine();
  for (int64_t samples = 100; samples < 1200; ++samples) {
    ASSERT_LE(schedule.at(samples + 1), schedule.at(samples)) << samples;
    ASSERT_GE(schedule.at(samples), schedule.min_lr) << samples;
  }
}

TEST(LearningRate, ConstantAfterTheWarmup) {
  LearningRateSchedule schedule = cosine();
  schedule.style = LrDecayStyle::constant;
  EXPECT_DOUBLE_EQ(schedule.at(50), 0.005);
  EXPECT_EQ(schedule.at(101), 0.01);
  EXPECT_EQ(schedule.at(600), 0.01);
  EXPECT_EQ(schedule.at(100000), 0.01);
}

TEST(LearningRate, WithoutWarmupTheFirstUpdateIsOnTheCosine) {
  LearningRateSchedule schedule = cosine();
  schedule.warmup_samples = 0;
  schedule.decay_samples = 10;
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.001 + 0.009 * 0.5 * (1 + std::cos(std::numbers::pi / 10)));
}

TEST(LearningRate, WarmupThatFillsTheDecay) {
  LearningRateSchedule schedule = cosine();
  schedule.decay_samples = 100;
  EXPECT_DOUBLE_EQ(schedule.at(100), 0.01);
  EXPECT_EQ(schedule.at(101), 0.001);
}

}  // namespace
}  // namespace troupe
