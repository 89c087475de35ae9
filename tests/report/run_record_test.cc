// What is read of a run's folder: numbers by step, times at work, and lines that are left out.
#include "report/run_record.h"

#include <cmath>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/files.h"

namespace troupe::testing {
namespace {

class RunFolder : public ::testing::Test {
 protected:
  RunRecord read(const std::string& lines) const {
    put_file(folder / "metrics.jsonl", lines);
    return read_run(folder.path());
  }
  // The notes of a run, except those of a folder with metrics alone.
  std::vector<std::string> notes_of(const std::string& lines) const {
    put_file(folder / "options.toml", "lr = 1\n");
    return read(lines).notes;
  }
  TempFolder folder;
};

std::string step_at(int step, const std::string& time, const std::string& more = "") {
  return R"({"step": )" + std::to_string(step) + R"(, "time": "2026-02-28T)" + time +
         R"(Z", "loss": 2, "tokens": )" + std::to_string(10 * step) + more + "}\n";
}

std::string header_at(int step, const std::string& time) {
  return R"({"header": 1, "step": )" + std::to_string(step) + R"(, "time": "2026-02-28T)" + time +
         "Z\"}\n";
}

// Of two starts: what lies between them is no work, nor does a clock that is set back take any off.
TEST_F(RunFolder, SecondsAtWorkGoOnOverStarts) {
  const RunRecord run =
      read(header_at(0, "23:00:00.000") + step_at(1, "23:00:01.500") + step_at(2, "23:01:00.000") +
           header_at(2, "23:30:00.000") + step_at(3, "23:30:02.250") + step_at(4, "23:29:00.000") +
           step_at(5, "23:30:10.000"));
  EXPECT_EQ(run.steps, (std::vector<int64_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(run.work_seconds, (std::vector<double>{1.5, 60, 62.25, 62.25, 70}));
  EXPECT_EQ(run.tokens, (std::vector<double>{10, 20, 30, 40, 50}));
  EXPECT_EQ(run.last_time, "2026-02-28T23:30:10.000Z");
  EXPECT_EQ(run.starts.size(), 2U);
  EXPECT_EQ(run.starts.back().step, 2);
}

// Months differ in length: from the end of February to March is a day.
TEST_F(RunFolder, DatesAreThoseOfTheCalendar) {
  const std::string begin = R"({"header": 1, "step": 0, "time": "2026-02-28T23:59:59.000Z"})";
  const std::string end = R"({"step": 1, "time": "2026-03-01T00:00:01.000Z", "loss": 1})";
  EXPECT_EQ(read(begin + "\n" + end + "\n").work_seconds, std::vector<double>{2});
}

TEST_F(RunFolder, TimesThatAreNoneAreNoWork) {
  const RunRecord run = read(header_at(0, "23:00:00.000") + step_at(1, "23:00:01.000") +
                             R"({"step": 2, "time": "yesterday", "loss": 1})" + "\n");
  EXPECT_EQ(run.work_seconds, (std::vector<double>{1, 1}));
}

TEST_F(RunFolder, LinesThatSayNothingAreCountedAndLeftOut) {
  const std::string good = step_at(1, "23:00:01.000");
  EXPECT_EQ(notes_of(good), std::vector<std::string>{});
  for (const char* bad :
       {"{", "[]", R"({"loss": 1})", R"({"step": -1, "loss": 1})", R"({"step": 2.5, "loss": 1})",
        R"({"step": 2})", R"({"step": 2, "loss": "low"})",
        R"({"step": 2, "loss": 1, "experts": 3})",
        R"({"step": 2, "loss": 1, "experts": [{"layer": 0}]})",
        R"({"step": 2, "loss": 1, "experts": [{"layer": 0, "rows": [1, "2"]}]})"}) {
    const std::vector<std::string> notes = notes_of(good + bad + "\n");
    ASSERT_EQ(notes.size(), 1U) << bad;
    expect_phrase(notes.front(), "2");
    EXPECT_EQ(read(good + bad + "\n").steps, std::vector<int64_t>{1}) << bad;
  }
  const RunRecord again = read(step_at(3, "23:00:01.000") + step_at(3, "23:00:02.000"));
  EXPECT_EQ(again.steps, std::vector<int64_t>{3});
  EXPECT_EQ(again.notes.size(), 1U);
}

TEST_F(RunFolder, NumbersOfExpertsAreSumsAndMeans) {
  const std::string experts =
      R"(, "experts": [{"layer": 0, "rows": [3, 0], "dead": 1, "dropped": 0.5, "entropy": 0.25},
          {"layer": 1, "rows": [2, 1], "dead": 2, "dropped": 0.25, "entropy": 0.75}])";
  std::string line = step_at(7, "23:00:01.000", experts);
  line.erase(line.find('\n'), 1);
  const RunRecord run = read(line);
  ASSERT_EQ(run.steps, std::vector<int64_t>{7});
  EXPECT_EQ(run.curves.at("dead_experts").values, std::vector<double>{3});
  EXPECT_EQ(run.curves.at("dropped").values, std::vector<double>{0.375});
  EXPECT_EQ(run.curves.at("router_entropy").values, std::vector<double>{0.5});
  EXPECT_EQ(run.curves.at("router_entropy").steps, std::vector<int64_t>{7});
  EXPECT_EQ(run.loads.stretches().front()[1].rows, (std::vector<double>{2, 1}));
}

// Of the best step where it was better than what was measured.
TEST_F(RunFolder, TheShareOfTheLimitIsAtMostOne) {
  const auto with = [&](const char* limit) {
    return read(std::string(R"({"header": 1, "step": 0, "matmul_limit_tflops": )") + limit + "}\n" +
                step_at(1, "23:00:01.000", R"(, "tflops_per_gpu": 2)") +
                step_at(2, "23:00:02.000", R"(, "tflops_per_gpu": 4)"));
  };
  EXPECT_EQ(with("8").curves.at("limit_share").values, (std::vector<double>{0.25, 0.5}));
  EXPECT_EQ(with("2").curves.at("limit_share").values, (std::vector<double>{0.5, 1}));
  EXPECT_EQ(with("0").curves.count("limit_share"), 0U);
}

TEST_F(RunFolder, EvaluationsAndWhatWentWrong) {
  const RunRecord run =
      read(step_at(1, "23:00:01.000", R"(, "skipped": true)") +
           step_at(2, "23:00:02.000",
                   R"(, "skipped": false, "expert_rooms_lacked": 2, "expert_room_needed": 1.5)") +
           R"({"step": 2, "val_loss": 3, "val_loss/books": null})" + "\n");
  EXPECT_EQ(run.skipped, std::vector<int64_t>{1});
  ASSERT_EQ(run.overflows.size(), 1U);
  EXPECT_EQ(run.overflows[0].step, 2);
  EXPECT_EQ(run.overflows[0].rooms_lacked, 2);
  EXPECT_EQ(run.overflows[0].room_needed, 1.5);
  EXPECT_EQ(run.evaluations.at("val_loss").values, std::vector<double>{3});
  EXPECT_TRUE(std::isnan(run.evaluations.at("val_loss/books").values.front()));
  EXPECT_EQ(run.notes,
            std::vector<std::string>{"The options are not known: the folder has no options.toml."});
}

TEST_F(RunFolder, AFolderWithoutARunIsRefused) {
  expect_phrase(message_of(ExitStatus::bad_request, [&] { read_run(folder.path()); }),
                "the folder has no metrics.jsonl");
  expect_phrase(message_of(ExitStatus::bad_request, [&] { read_run(folder / "none"); }),
                "there is no such folder");
}

TEST(NameRuns, ByTheShortestEndThatTellsThemApart) {
  std::vector<RunRecord> runs(3);
  runs[0].folder = "/a/x/run";
  runs[1].folder = "/a/y/run";
  runs[2].folder = "/a/y/other";
  name_runs(runs);
  EXPECT_EQ(runs[0].name, "x/run");
  EXPECT_EQ(runs[1].name, "y/run");
  EXPECT_EQ(runs[2].name, "other");
}

}  // namespace
}  // namespace troupe::testing
