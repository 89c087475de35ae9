// Step profiles of made-up spans: times by kind, gaps, exposed communication, timelines; and which
// steps are profiled.
#include "train/step_profile.h"

#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <gtest/gtest.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "program/builder.h"
#include "support/errors.h"
#include "support/files.h"

namespace troupe {
namespace {

// 0: fill, 1: sum over the ranks, 2: add.
class ProfiledProgram : public ::testing::Test {
 protected:
  ProfiledProgram() : program(std::make_shared<StateTable>()) {
    Builder builder(program);
    builder.place.layer = 3;
    const ValueId one = fill(builder, 1.0, DType::f64, {4}, "one");
    const ValueId all = sum_over_ranks(builder, one, {RankGroup::dp}, "all");
    builder.place.micro_batch = 1;
    program.add_result(add(builder, all, one, "result"));
  }
  Program program;
};

TEST_F(ProfiledProgram, KindsAreMediansOverRuns) {
  StepProfile profile(program);
  for (const double seconds : {5.0, 1.0, 2.0}) {
    // Two kernels of one operation count together; what belongs to none does not count.
    profile.add({{.op = -1, .name = "copy", .begin_s = 0, .duration_s = 100},
                 {.op = 0, .name = "fill", .begin_s = 100, .duration_s = seconds},
                 {.op = 0, .name = "fill", .begin_s = 110, .duration_s = 1},
                 {.op = 2, .name = "add", .begin_s = 120, .duration_s = 0.5}});
  }
  const std::vector<KindTime> kinds = profile.kinds();
  ASSERT_EQ(kinds.size(), 3U);
  EXPECT_EQ(kinds[0].kind, "fill");
  EXPECT_EQ(kinds[0].count, 1);
  EXPECT_DOUBLE_EQ(kinds[0].seconds, 3.0);
  EXPECT_EQ(kinds[1].kind, "add");
  EXPECT_DOUBLE_EQ(kinds[1].seconds, 0.5);
  EXPECT_DOUBLE_EQ(kinds[2].seconds, 0.0) << "an operation that launches nothing";
}

TEST_F(ProfiledProgram, TimesCountGapsAndWhatIsExposed) {
  StepProfile profile(program);
  // 0..2 fill, 1..5 communication beside it, 5..6 idle, 6..7 add.
  profile.add({{.op = 0, .name = "fill", .begin_s = 0, .duration_s = 2},
               {.op = 1, .name = "sum", .begin_s = 1, .duration_s = 4},
               {.op = 2, .name = "add", .begin_s = 6, .duration_s = 1}});
  const StepTimes times = profile.times();
  EXPECT_DOUBLE_EQ(times.seconds, 7);
  EXPECT_DOUBLE_EQ(times.busy_s, 6);
  EXPECT_DOUBLE_EQ(times.communication_s, 4);
  EXPECT_DOUBLE_EQ(times.exposed_communication_s, 3);
  EXPECT_DOUBLE_EQ(times.largest_gap_s, 1);
  EXPECT_EQ(times.after_gap, "add");
}

// Exposed is what the communication queue does while the compute queue does nothing: not what runs
// beside copies, several at once count once, and waiting within an operation counts as its time.
TEST_F(ProfiledProgram, ExposedCommunicationIsThatWithoutCompute) {
  Builder builder(program);
  builder.place.queue = Queue::copy;
  fill(builder, 1.0, DType::f64, {4}, "copied");  // 3
  StepProfile profile(program);
  const auto exposed = [&](std::vector<WorkSpan> spans) {
    profile.add(std::move(spans));
    return profile.times().exposed_communication_s;
  };
  const auto span = [](int32_t op, double begin, double end) {
    return WorkSpan{.op = op, .name = "kernel", .begin_s = begin, .duration_s = end - begin};
  };
  EXPECT_DOUBLE_EQ(exposed({span(1, 0, 4)}), 4);
  EXPECT_DOUBLE_EQ(exposed({span(0, 0, 5), span(1, 1, 4)}), 0) << "within compute";
  EXPECT_DOUBLE_EQ(exposed({span(1, 0, 5), span(0, 1, 2), span(2, 3, 4)}), 3) << "around compute";
  EXPECT_DOUBLE_EQ(exposed({span(0, 0, 2), span(1, 1, 4), span(2, 3, 6)}), 1) << "between";
  EXPECT_DOUBLE_EQ(exposed({span(1, 0, 2), span(1, 1, 3), span(0, 3, 4)}), 3) << "counted once";
  EXPECT_DOUBLE_EQ(exposed({span(3, 0, 5), span(1, 1, 4)}), 3) << "copies hide nothing";
  EXPECT_DOUBLE_EQ(exposed({span(-1, 0, 5), span(1, 1, 4)}), 3) << "nor do inputs on their way";
  EXPECT_DOUBLE_EQ(exposed({span(3, 0, 5), span(0, 6, 7)}), 0) << "copies are no communication";
  EXPECT_DOUBLE_EQ(profile.times().communication_s, 0);
}

// Of 4 numbers in f64, add reads two and writes one.
TEST_F(ProfiledProgram, KindsOfAHundredthOfTheTimeRaiseTheLimits) {
  const ProfileLimits measured{.flops = 0.5, .copy_bytes = 1};
  const auto best = [&](double add_s) {
    StepProfile profile(program);
    profile.add({{.op = 0, .name = "fill", .begin_s = 0, .duration_s = 100},
                 {.op = 2, .name = "add", .begin_s = 100, .duration_s = add_s}});
    return best_limits(measured, profile);
  };
  EXPECT_DOUBLE_EQ(best(4).flops, 1);
  EXPECT_DOUBLE_EQ(best(4).copy_bytes, 24);
  EXPECT_DOUBLE_EQ(best(0.5).flops, measured.flops) << "too short to be measured";
  EXPECT_DOUBLE_EQ(best(0.5).copy_bytes, measured.copy_bytes);
}

TEST_F(ProfiledProgram, TimelineHasATrackForEachQueue) {
  const testing::TempFolder folder;
  StepProfile profile(program);
  profile.add({{.op = 0, .name = "fill", .begin_s = 0, .duration_s = 1},
               {.op = 1, .name = "sum", .begin_s = 0.5, .duration_s = 1}});
  const std::string path = folder.path() + "/timeline.json";
  const std::vector<std::string> ranks = {profile.timeline_events(/*rank=*/0)};
  write_timeline(path, ranks);
  std::ifstream file(path);
  const auto events = nlohmann::json::parse(file).at("traceEvents");
  ASSERT_EQ(events.size(), 5U);
  EXPECT_EQ(events[1].at("name"), "thread_name");
  EXPECT_EQ(events[1].at("args").at("name"), "compute");
  EXPECT_EQ(events[2].at("args").at("name"), "comm");
  EXPECT_EQ(events[3].at("tid"), events[1].at("tid"));
  EXPECT_EQ(events[4].at("tid"), events[2].at("tid"));
  EXPECT_NE(events[3].at("tid"), events[4].at("tid"));
}

TEST_F(ProfiledProgram, NamesKernelsOfKindsThatHaveSeveral) {
  StepProfile profile(program, {"fast", "sum_over_ranks", "packs"});
  profile.add({{.op = 0, .name = "fill", .begin_s = 0, .duration_s = 2},
               {.op = 2, .name = "add", .begin_s = 2, .duration_s = 1}});
  const std::vector<KindTime> kinds = profile.kinds();
  EXPECT_EQ(kinds[0].kernels, "fast");
  EXPECT_EQ(kinds[1].kernels, "packs");
  EXPECT_EQ(kinds[2].kernels, "") << "the only one of its kind";
  const ProfileLimits limits{.flops = 1, .copy_bytes = 1};
  const std::string text = describe_profile(profile, limits);
  EXPECT_NE(text.find("kernels: fill by fast; add by packs\n"), std::string::npos) << text;
  EXPECT_EQ(describe_profile(profile, limits, "sum").find("kernels:"), std::string::npos);
  EXPECT_NE(profile.timeline_events(0).find(R"("variant":"packs")"), std::string::npos);
}

TEST_F(ProfiledProgram, TimelineNamesOperations) {
  const testing::TempFolder folder;
  StepProfile profile(program);
  profile.add({{.op = -1, .name = "copy", .begin_s = 0, .duration_s = 1e-6},
               {.op = 2, .name = "add_kernel", .begin_s = 2e-6, .duration_s = 3e-6}});
  const std::string path = folder.path() + "/deeper/timeline.json";
  const std::vector<std::string> ranks = {profile.timeline_events(/*rank=*/5)};
  write_timeline(path, ranks);
  std::ifstream file(path);
  const auto events = nlohmann::json::parse(file).at("traceEvents");
  ASSERT_EQ(events.size(), 4U);
  EXPECT_EQ(events[0].at("args").at("name"), "rank 5");
  EXPECT_EQ(events[1].at("name"), "thread_name");
  EXPECT_EQ(events[2].at("name"), "copy");
  EXPECT_EQ(events[3].at("name"), "add");
  EXPECT_EQ(events[3].at("pid"), 5);
  EXPECT_DOUBLE_EQ(events[3].at("ts").get<double>(), 2.0) << "microseconds";
  EXPECT_DOUBLE_EQ(events[3].at("dur").get<double>(), 3.0);
  EXPECT_EQ(events[3].at("args").at("kernel"), "add_kernel");
  EXPECT_EQ(events[3].at("args").at("layer"), 3);
  EXPECT_EQ(events[3].at("args").at("micro_batch"), 1);
  EXPECT_EQ(events[3].at("args").at("result"), "result");
}

TEST_F(ProfiledProgram, TimelinesOfSeveralRanksHaveOneClock) {
  const testing::TempFolder folder;
  const std::string path = folder.path() + "/timeline.json";
  std::vector<std::string> ranks;
  for (const int32_t rank : {0, 2}) {
    StepProfile profile(program);
    profile.add({{.op = 0, .name = "fill", .begin_s = 1e-6, .duration_s = 1e-6}}, rank * 1e-3);
    ranks.push_back(profile.timeline_events(rank));
  }
  write_timeline(path, ranks);
  std::ifstream file(path);
  const auto events = nlohmann::json::parse(file).at("traceEvents");
  ASSERT_EQ(events.size(), 6U);
  EXPECT_EQ(events[3].at("args").at("name"), "rank 2");
  EXPECT_EQ(events[5].at("pid"), 2);
  EXPECT_DOUBLE_EQ(events[2].at("ts").get<double>(), 1.0);
  EXPECT_DOUBLE_EQ(events[5].at("ts").get<double>(), 2001.0);
}

// Rates have a digit after the point up to 1000, shares of the limits end at 100 %, and the last
// line is about the last run.
TEST_F(ProfiledProgram, IsDescribedByATable) {
  StepProfile profile(program);
  profile.add({{.op = 0, .name = "fill", .begin_s = 0, .duration_s = 3e-6},
               {.op = 1, .name = "sum", .begin_s = 2e-6, .duration_s = 4e-6},
               {.op = 2, .name = "add", .begin_s = 8e-6, .duration_s = 1e-6}});
  const ProfileLimits limits{.flops = 8e6, .copy_bytes = 192e6};
  EXPECT_EQ(describe_profile(profile, limits),
            "operation kind                    count     time share Gflop/s   of   GB/s   of\n"
            "sum_over_ranks                        1   4.0 us 50.0%     0.0  12%    0.0   8%\n"
            "fill                                  1   3.0 us 37.5%     0.0   0%    0.0   6%\n"
            "add                                   1   1.0 us 12.5%     0.0  50%    0.1  50%\n"
            "\n"
            "9.0 us from first to last, idle 2.0 us of it, at most 2.0 us between operations\n"
            "  (before add); communication 4.0 us, 3.0 us of it exposed\n");
  EXPECT_EQ(describe_profile(profile, limits, "fill"),
            "operation kind                    count     time share Gflop/s   of   GB/s   of\n"
            "fill                                  1   3.0 us 37.5%     0.0   0%    0.0   6%\n"
            "\n"
            "9.0 us from first to last, idle 2.0 us of it, at most 2.0 us between operations\n"
            "  (before add); communication 4.0 us, 3.0 us of it exposed\n");
  StepProfile fast(program);
  fast.add({{.op = 0, .name = "fill", .begin_s = 0, .duration_s = 32e-12},
            {.op = 2, .name = "add", .begin_s = 32e-12, .duration_s = 96e-12}});
  EXPECT_EQ(describe_profile(fast, {.flops = 1e12, .copy_bytes = 1e13}),
            "operation kind                    count     time share Gflop/s   of   GB/s   of\n"
            "add                                   1   0.0 us 75.0%    41.7   4%   1000  10%\n"
            "fill                                  1   0.0 us 25.0%     0.0   0%   1000  10%\n"
            "sum_over_ranks                        1   0.0 ms  0.0%    4000 100%  64000 100%\n"
            "\n"
            "0.0 us from first to last, idle 0.0 ms of it, at most 0.0 ms between operations\n");
}

TEST_F(ProfiledProgram, LimitsAreRaisedAboveAHundredthOfTheTime) {
  StepProfile profile(program);
  profile.add({{.op = 0, .name = "fill", .begin_s = 0, .duration_s = 99},
               {.op = 2, .name = "add", .begin_s = 99, .duration_s = 1}});
  EXPECT_DOUBLE_EQ(best_limits({.flops = 0.5, .copy_bytes = 1}, profile).flops, 0.5);
  EXPECT_DOUBLE_EQ(best_limits({.flops = 0.5, .copy_bytes = 1}, profile).copy_bytes, 1);
}

TEST_F(ProfiledProgram, TimesOfStepsWithoutGapsOrCommunication) {
  StepProfile profile(program);
  profile.add({{.op = 0, .name = "fill", .begin_s = 0, .duration_s = 2},
               {.op = -1, .name = "copy", .begin_s = 2, .duration_s = 3},
               {.op = 2, .name = "add", .begin_s = 2, .duration_s = 1}});
  const StepTimes times = profile.times();
  EXPECT_DOUBLE_EQ(times.seconds, 5) << "a copy may end last";
  EXPECT_DOUBLE_EQ(times.busy_s, 5);
  EXPECT_DOUBLE_EQ(times.communication_s, 0);
  EXPECT_DOUBLE_EQ(times.largest_gap_s, 0);
  EXPECT_EQ(times.after_gap, "");
  EXPECT_EQ(StepProfile(program).times().seconds, 0);
}

}  // namespace
}  // namespace troupe
