// How long steps are planned to take: by equal parts of what ranks share, and only where all of
// them know what they run on.
#include "train/planned_time.h"

#include <chrono>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/thread_group.h"
#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "options/cluster_options.h"
#include "parallel/layout.h"
#include "program/builder.h"
#include "program/test_models.h"

namespace troupe::testing {
namespace {

// What each of the ranks of a pipeline is told of a program of elementwise operations. Ranks
// without figures know none.
std::vector<std::optional<PlannedTime>> planned_of(const std::vector<std::optional<GpuModel>>& of) {
  const auto ranks = static_cast<int32_t>(of.size());
  std::vector<std::optional<PlannedTime>> found(of.size());
  ThreadGroup group(ranks, std::chrono::seconds(60));
  const auto layout = std::make_shared<const RunLayout>(
      RunLayout{Layout({.world_size = ranks, .embedding_places = {0}}),
                even_partition(1, 1, 1, StagePlacement::loop).value(),
                {}});
  run_ranks(group, [&](int rank) {
    RankSession session({.ranks = ranks, .threads = ranks}, rank, ranks == 1 ? nullptr : &group);
    session.declare(dense_model(1), DType::f32, /*trained=*/false, layout);
    Program program(session.state().table);
    Builder builder(program);
    const ValueId a = fill(builder, 1, DType::f64, {1 << 20}, "a");
    program.add_result(add(builder, a, a, "b"));
    found[static_cast<size_t>(rank)] =
        plan_time(session, program, session.plan(program), of[static_cast<size_t>(rank)]);
  });
  return found;
}

TEST(PlannedTime, RanksHaveEqualPartsOfWhatTheyShare) {
  const GpuModel whole = hardware_of("h100");
  const auto halved = planned_of({whole, whole});
  ASSERT_TRUE(halved[0]);
  EXPECT_FALSE(halved[1]) << "rank 0 alone compares";
  GpuModel half = whole;
  for (double* const rate : {&half.bf16_flops, &half.f32_flops, &half.f64_flops,
                             &half.memory_bandwidth, &half.host_bandwidth}) {
    *rate /= 2;
  }
  const auto one = planned_of({half});
  ASSERT_TRUE(one[0]);
  EXPECT_EQ(halved[0]->hardware, whole.name);
  EXPECT_EQ(halved[0]->seconds, one[0]->seconds);
  EXPECT_EQ(halved[0]->of_kinds, one[0]->of_kinds);
  ASSERT_EQ(one[0]->of_kinds.size(), 2U);
  // 8 MiB written, and then read and written, at the bytes per second of a copy.
  const double bytes = 8 * (1 << 20);
  EXPECT_GE(one[0]->of_kinds.at("add"), bytes / half.memory_bandwidth);
  EXPECT_GE(one[0]->seconds, 2 * bytes / half.memory_bandwidth);
}

TEST(PlannedTime, IsNotKnownWhereOneRankKnowsNoFigures) {
  const GpuModel known = hardware_of("h100");
  EXPECT_FALSE(planned_of({known, std::nullopt})[0]);
  EXPECT_FALSE(planned_of({std::nullopt, known})[0]);
  EXPECT_FALSE(planned_of({std::nullopt})[0]);
}

TEST(PlannedTime, GoesByTheFiguresThatAreNamed) {
  const RankSession session({.ranks = 1, .threads = 1}, 0, nullptr);
  EXPECT_EQ(hardware_of_run("h200", session)->name, hardware_of("h200").name);
  EXPECT_FALSE(hardware_of_run("", session)) << "a CPU has none";
  EXPECT_FALSE(hardware_of_run(std::string(kNoHardware), session));
}

}  // namespace
}  // namespace troupe::testing
