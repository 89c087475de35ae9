// Warnings about routers that go wrong: when they appear, and that they appear once.
#include "train/routing_watch.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace troupe {
namespace {

StepMetrics step_of(const std::vector<int64_t>& rows, double entropy = 1.3) {
  StepMetrics metrics;
  metrics.layers.push_back(
      {.layer = 5, .rows = rows, .slots = 0, .entropy = entropy, .losses = {}});
  return metrics;
}

TEST(RoutingWatch, IsSilentWithoutThresholds) {
  RoutingWatch watch({});
  watch.add(step_of({100, 0, 0, 0}, 0));
  EXPECT_TRUE(watch.look(1).empty());
}

TEST(RoutingWatch, ReportsImbalanceOnceAndItsEnd) {
  RoutingWatch watch({.load_imbalance = 2});
  watch.add(step_of({70, 10, 10, 10}));  // 2.8 times the mean
  const std::vector<std::string> lines = watch.look(10);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("Warning: step 10, layer 5"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("2.80 times"), std::string::npos) << lines[0];
  watch.add(step_of({70, 10, 10, 10}));
  EXPECT_TRUE(watch.look(20).empty());
  watch.add(step_of({30, 20, 30, 20}));
  const std::vector<std::string> end = watch.look(30);
  ASSERT_EQ(end.size(), 1U);
  EXPECT_EQ(end[0].rfind("Back within the threshold", 0), 0U) << end[0];
}

// What one step lacks, another may bring: the loads are summed between two looks.
TEST(RoutingWatch, JudgesTheStepsBetweenTwoLooksTogether) {
  RoutingWatch watch({.load_imbalance = 1.5, .dead_experts = 0.2});
  watch.add(step_of({50, 50, 0, 0}));
  watch.add(step_of({0, 0, 50, 50}));
  EXPECT_TRUE(watch.look(2).empty());
  watch.add(step_of({50, 50, 0, 0}));
  EXPECT_EQ(watch.look(3).size(), 2U);
}

TEST(RoutingWatch, CountsDeadExpertsAsAShareOfAll) {
  RoutingWatch watch({.dead_experts = 0.3});
  watch.add(step_of({10, 10, 10, 0}));
  EXPECT_TRUE(watch.look(1).empty()) << "0.25 of them";
  watch.add(step_of({10, 10, 0, 0}));
  EXPECT_EQ(watch.look(2).size(), 1U) << "0.5 of them";
}

TEST(RoutingWatch, ComparesEntropyWithItsLargestValue) {
  RoutingWatch watch({.router_entropy = 0.5});
  watch.add(step_of({1, 1, 1, 1}, 0.70));  // ln 4 is 1.386
  EXPECT_TRUE(watch.look(1).empty());
  watch.add(step_of({1, 1, 1, 1}, 0.69));
  EXPECT_EQ(watch.look(2).size(), 1U);
}

// One step in a hundred may lack room; a larger need is said again.
TEST(RoutingWatch, ReportsTheRoomThatWouldHaveSufficed) {
  RoutingWatch watch({});
  const auto lack = [&](double needed) {
    StepMetrics metrics = step_of({1, 1, 1, 1});
    metrics.rooms_lacked = 3;
    metrics.room_needed = needed;
    watch.add(metrics);
  };
  for (int i = 0; i < 199; ++i) watch.add(step_of({1, 1, 1, 1}));
  lack(1.501);
  EXPECT_TRUE(watch.look(200).empty());  // one of 200
  lack(1.25);
  lack(1.3);
  const std::vector<std::string> lines = watch.look(202);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("3 of 202 steps"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("--moe-expert-rank-capacity-factor 1.51"), std::string::npos) << lines[0];
  lack(1.87);
  EXPECT_TRUE(watch.look(203).empty());
  lack(1.88);
  EXPECT_EQ(watch.look(204).size(), 1U);
}

// Of room and stash only what was too small.
TEST(RoutingWatch, ReportsTheStashThatWouldHaveSufficed) {
  RoutingWatch watch({});
  StepMetrics metrics = step_of({1, 1, 1, 1});
  metrics.rooms_lacked = 1;
  metrics.stash_needed = 1.201;
  watch.add(metrics);
  std::vector<std::string> lines = watch.look(1);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("room. --moe-paged-stash-buffer-size-factor-cuda 1.21 would"),
            std::string::npos)
      << lines[0];
  metrics.stash_needed = 0;
  metrics.room_needed = 1.5;
  watch.add(metrics);
  lines = watch.look(2);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("--moe-expert-rank-capacity-factor 1.50 and "
                          "--moe-paged-stash-buffer-size-factor-cuda 1.21 would"),
            std::string::npos)
      << lines[0];
  metrics.stash_needed = 1.6;
  watch.add(metrics);
  EXPECT_EQ(watch.look(3).size(), 1U);
  watch.add(metrics);
  EXPECT_TRUE(watch.look(4).empty());
}

TEST(RouterMetrics, Numbers) {
  const RouterMetrics router{
      .layer = 0, .rows = {6, 0, 2, 0}, .rank_rows = {}, .slots = 10, .entropy = 0, .losses = {}};
  EXPECT_DOUBLE_EQ(router.imbalance(), 3);
  EXPECT_EQ(router.dead(), 2);
  EXPECT_DOUBLE_EQ(router.dropped(), 0.2);
}

TEST(RouterMetrics, OfRanksThatShareTheExperts) {
  StepMetrics metrics;
  EXPECT_FALSE(metrics.rank_load_imbalance());
  metrics.layers.push_back(
      {.layer = 0, .rows = {6, 0, 2, 0}, .rank_rows = {}, .slots = 8, .entropy = 0, .losses = {}});
  EXPECT_FALSE(metrics.rank_load_imbalance()) << "each rank has all experts";
  metrics.layers.front().rank_rows = {6, 2};
  metrics.layers.push_back(metrics.layers.front());
  metrics.layers.back().rank_rows = {5, 3};
  EXPECT_DOUBLE_EQ(metrics.layers.back().rank_imbalance(), 1.25);
  EXPECT_DOUBLE_EQ(metrics.rank_load_imbalance().value(), 1.5);
}

}  // namespace
}  // namespace troupe
