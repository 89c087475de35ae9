// What is said of runs, as text and as data of a page: curves that are thinned out, lists that are
// cut.
#include "report/run_report.h"

#include <cmath>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <numeric>

namespace troupe::testing {
namespace {

RunCurve curve_of_values(std::vector<double> values) {
  RunCurve curve{.steps = std::vector<int64_t>(values.size()), .values = std::move(values)};
  std::iota(curve.steps.begin(), curve.steps.end(), 10);
  return curve;
}

// A run whose logged steps are 1 to `count`, a second and 64 tokens each.
RunRecord run_of_steps(int64_t count) {
  RunRecord run;
  run.folder = "runs/it";
  run.name = "it";
  for (int64_t step = 1; step <= count; ++step) {
    run.steps.push_back(step);
    run.tokens.push_back(64.0 * static_cast<double>(step));
    run.work_seconds.push_back(static_cast<double>(step));
  }
  return run;
}

TEST(ThinOut, KeepsAllThatFits) {
  const double nan = std::nan("");
  for (const size_t count : {0, 1, 5, 6}) {
    std::vector<double> values(count);
    std::iota(values.begin(), values.end(), 1.0);
    EXPECT_EQ(thin_out(curve_of_values(values), 6).values, values) << count << " values";
  }
  const RunCurve thin = thin_out(curve_of_values({nan, 1, nan, 2, 3, 4, 5, 6, nan}), 6);
  EXPECT_EQ(thin.values, (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(thin.steps, (std::vector<int64_t>{11, 13, 14, 15, 16, 17}));
}

// The first, the last, and of two stretches between them the least and the most, in their order.
TEST(ThinOut, KeepsTheExtremesOfStretches) {
  const RunCurve thin = thin_out(curve_of_values({5, 9, 4, 7, 1, 3, 8, 6, 6}), 6);
  EXPECT_EQ(thin.values, (std::vector<double>{5, 9, 4, 1, 8, 6}));
  EXPECT_EQ(thin.steps, (std::vector<int64_t>{10, 11, 12, 14, 16, 18}));
  const RunCurve odd = thin_out(curve_of_values({0, 4, 3, 1, 2, 9, 7}), 6);
  EXPECT_EQ(odd.values, (std::vector<double>{0, 4, 3, 1, 9, 7}));
  // Where all of a stretch are the same, its ends.
  EXPECT_EQ(thin_out(curve_of_values(std::vector<double>(9, 2)), 6).steps,
            (std::vector<int64_t>{10, 11, 13, 14, 17, 18}));
}

TEST(RunReport, ListsAreCut) {
  RunRecord run = run_of_steps(1);
  const auto lines = [&] { return report_text({&run, 1}, {}); };
  for (int64_t step = 1; step <= 8; ++step) run.skipped.push_back(step);
  EXPECT_NE(lines().find("  skipped   8 of the logged steps: 1, 2, 3, 4, 5, 6, 7, 8\n"),
            std::string::npos)
      << lines();
  run.skipped.push_back(9);
  EXPECT_NE(lines().find("  skipped   9 of the logged steps: 1, 2, 3, 4, 5, 6, 7, 8, ...\n"),
            std::string::npos)
      << lines();
  for (const size_t count : {99, 100, 101}) {
    run.skipped.resize(count, 3);
    run.overflows.resize(count, {.step = 2, .rooms_lacked = 1, .room_needed = 1.5});
    const nlohmann::ordered_json shown = report_json({&run, 1}, {})["runs"][0];
    EXPECT_EQ(shown["skipped"].size(), std::min<size_t>(count, 100));
    EXPECT_EQ(shown["overflows"].size(), std::min<size_t>(count, 100));
    EXPECT_EQ(shown["summary"]["skipped_steps"], count);
    EXPECT_EQ(shown["summary"]["overflowing_steps"], count);
  }
}

// Also a room that is less than the even load.
TEST(RunReport, TheRoomThatWasNeededIsTheLargest) {
  RunRecord run = run_of_steps(1);
  const auto needed = [&] {
    return report_json({&run, 1}, {})["runs"][0]["summary"]["room_needed"];
  };
  EXPECT_EQ(needed(), nullptr);
  for (const double room : {0.5, 0.75, 0.625}) {
    run.overflows.push_back({.step = 1, .rooms_lacked = 1, .room_needed = room});
  }
  EXPECT_EQ(needed(), 0.75);
}

// Rounded up, as what is named must suffice.
TEST(RunReport, TheRoomThatIsNamedSuffices) {
  RunRecord run = run_of_steps(1);
  run.overflows.push_back(
      {.step = 1, .rooms_lacked = 1, .room_needed = 1.502, .stash_needed = 1.203});
  const std::string text = report_text({&run, 1}, {});
  EXPECT_NE(text.find("--moe-expert-rank-capacity-factor 1.51 and"), std::string::npos) << text;
  EXPECT_NE(text.find("--moe-paged-stash-buffer-size-factor-cuda 1.21"), std::string::npos) << text;
}

// Of 300 points the first and the last are those of the run.
TEST(RunReport, AxesHaveAtMostThreeHundredPoints) {
  for (const int64_t count : {1, 2, 299, 300, 301, 598}) {
    const RunRecord run = run_of_steps(count);
    const nlohmann::ordered_json axes = report_json({&run, 1}, {})["runs"][0]["axes"];
    const auto points = static_cast<size_t>(std::min<int64_t>(count, 300));
    ASSERT_EQ(axes["steps"].size(), points) << count;
    for (size_t i = 0; i < points; ++i) {
      const int64_t step =
          points == 1 ? 1
                      : 1 + static_cast<int64_t>(i) * (count - 1) / (count > 300 ? 299 : count - 1);
      EXPECT_EQ(axes["steps"][i], step);
      EXPECT_EQ(axes["tokens"][i], 64.0 * static_cast<double>(step));
      EXPECT_EQ(axes["seconds"][i], static_cast<double>(step));
    }
  }
}

TEST(RunReport, SaysWhatIsKnownAlone) {
  RunRecord run = run_of_steps(2);
  run.tokens.back() = std::nan("");
  run.curves["grad_norm"] = curve_of_values({std::nan("")});
  run.curves["tokens_per_s"] = curve_of_values({30, 10, 20, 40});
  run.curves["peak_bytes"] = curve_of_values({-1});
  run.curves["step_time_s"] = curve_of_values({2});
  run.curves["planned_step_time_s"] = curve_of_values({0});
  EXPECT_EQ(report_text({&run, 1}, {}),
            "it\n"
            "  steps     1 to 2, 2.00 s\n"
            "  speed     30 tokens/s (medians)\n"
            "  memory    0 B allocated at most\n"
            "\n");
  run.starts = {{.device = "cpu", .model = "m", .ranks = 1},
                {.host = "h", .device = "gpu", .ranks = 3}};
  const std::vector<LoadHistory::LayerRows> rows = {{.layer = 0, .rows = {1, 3}}};
  run.loads.add(1, rows);
  run.curves["dead_experts"] = curve_of_values({0, 0});
  run.curves["dropped"] = curve_of_values({0, 0});
  run.curves["planned_step_time_s"] = curve_of_values({8, 4});
  run.curves["tflops_per_gpu"] = curve_of_values({1.5});
  run.curves["limit_share"] = curve_of_values({0.125});
  EXPECT_EQ(report_text({&run, 1}, {}),
            "it\n"
            "  model     0 parameters (0 active)\n"
            "  where     3 ranks, gpu on h, 2 starts\n"
            "  steps     1 to 2, 2.00 s\n"
            "  speed     30 tokens/s, 1.5 TFLOP/s of each rank, 12% of the limit (medians)\n"
            "  memory    0 B allocated at most\n"
            "  step      2.00 s (median), 4.00 s planned: 0.50 times as long\n"
            "            no dead expert in any logged step\n"
            "\n");
  run.curves["dead_experts"] = curve_of_values({0, 1, 0});
  run.curves["dropped"] = curve_of_values({0, 0.001, 0});
  EXPECT_NE(report_text({&run, 1}, {})
                .find("            0 dead at the end, at most 1 at step 11\n"
                      "            0.1% of the choices dropped at most, at step 11\n"),
            std::string::npos);
}

// Of several runs those whose values differ; of one run those that are not the defaults.
TEST(RunReport, OptionsThatDiffer) {
  std::vector<RunRecord> runs(2);
  runs[0].options = {{"lr", "1"}, {"seed", "2"}, {"save", "a"}, {"profile-dir", "a"}, {"new", "x"}};
  runs[1].options = {{"lr", "1"}, {"seed", "3"}, {"save", "b"}, {"profile-dir", "b"}};
  const std::map<std::string, std::string> defaults = {{"lr", "5"}, {"seed", "2"}, {"save", ""}};
  const auto text_of = [&](std::span<const RunRecord> of) {
    std::string text;
    for (const OptionRow& row : options_that_differ(of, defaults)) {
      text += row.name + ":";
      for (const auto& value : row.values) text += " " + value.value_or("none");
      text += "\n";
    }
    return text;
  };
  EXPECT_EQ(text_of(runs), "new: x none\nseed: 2 3\n");
  EXPECT_EQ(text_of({runs.data(), 1}), "lr: 1\nnew: x\n");
  runs[1].options = runs[0].options;
  EXPECT_EQ(report_text(runs, options_that_differ(runs, defaults)),
            "\n\n\n\nThe options of these runs are the same.\n");
}

}  // namespace
}  // namespace troupe::testing
