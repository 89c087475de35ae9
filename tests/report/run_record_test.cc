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

// Every field of a header, by its name in the line.
std::vector<std::string> fields_of(const StartLine& start) {
  return {std::to_string(start.step),
          start.time,
          start.host,
          start.device,
          start.version,
          start.commit,
          start.model,
          std::to_string(start.ranks),
          std::to_string(start.parameters),
          std::to_string(start.active_parameters),
          std::to_string(start.matmul_limit_tflops)};
}

TEST_F(RunFolder, HeadersAreReadFieldByField) {
  const RunRecord run =
      read(R"({"header": 1, "step": 3, "time": "t", "host": "h", "device": "d", "version": "v", )"
           R"("commit": "c", "model": "m", "ranks": 4, "parameters": 5, "active_parameters": 6, )"
           R"("matmul_limit_tflops": 0.5})"
           "\n"
           R"({"header": 1, "step": 0})"
           "\n"
           R"({"header": 1, "step": 0, "time": 1, "host": null, "ranks": 2.5, "parameters": "5", )"
           R"("active_parameters": null, "matmul_limit_tflops": -1})"
           "\n");
  std::vector<std::vector<std::string>> found;
  for (const StartLine& start : run.starts) found.push_back(fields_of(start));
  const std::vector<std::string> nothing = {"0", "", "", "", "", "", "", "0", "0", "0", "0.000000"};
  EXPECT_EQ(found,
            (std::vector<std::vector<std::string>>{
                {"3", "t", "h", "d", "v", "c", "m", "4", "5", "6", "0.500000"}, nothing, nothing}));
  EXPECT_EQ(run.last_time, "t") << "of the last line that says one";
}

// A layer without its number is the first; the mean is over the layers that are there.
TEST_F(RunFolder, NumbersThatALineLacksAreNotKnown) {
  const RunRecord run =
      read(R"({"step": 0, "loss": null, "name": "x", "experts": [{"rows": [1, 2]}]})"
           "\n"
           R"({"step": 1, "loss": 3, "experts": []})"
           "\n");
  EXPECT_EQ(run.steps, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(run.work_seconds, (std::vector<double>{0, 0}));
  EXPECT_TRUE(std::isnan(run.tokens[0]) && std::isnan(run.tokens[1]));
  EXPECT_EQ(run.loads.stretches().front()[0].layer, 0);
  std::vector<std::string> names;
  for (const auto& [name, curve] : run.curves) {
    names.push_back(name + " " + std::to_string(curve.steps.size()));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"dead_experts 1", "dropped 1", "loss 2",
                                             "router_entropy 1"}));
  EXPECT_TRUE(std::isnan(run.curves.at("loss").values[0]));
  EXPECT_EQ(run.curves.at("loss").values[1], 3);
  EXPECT_TRUE(std::isnan(run.curves.at("dead_experts").values[0]));
  EXPECT_TRUE(run.overflows.empty());
}

// One sentence for each reason, with the number of the first such line.
TEST_F(RunFolder, NotesSayWhatWasLeftOut) {
  const auto step = [](int number) { return step_at(number, "23:00:01.000"); };
  const std::string rows = R"({"step": 9, "loss": 1, "experts": [{"rows": [1]}]})"
                           "\n";
  const std::string others = R"({"step": 10, "loss": 1, "experts": [{"rows": [1, 2]}]})"
                             "\n";
  const std::string more = R"({"step": 11, "loss": 1, "experts": [{"rows": [1, 2]}]})"
                           "\n";
  EXPECT_EQ(notes_of(step(1) + "[]\n" + step(1) + rows + others + "{"),
            (std::vector<std::string>{
                "metrics.jsonl: line 6, the last, is cut; it is left out.",
                "metrics.jsonl: line 2 is not a line of metrics; it is left out.",
                "metrics.jsonl: line 3 is of a step that is not after the one before; it is left "
                "out.",
                "metrics.jsonl: line 5 is with experts that are not those of the steps before; it "
                "is left out."}));
  EXPECT_EQ(
      notes_of(step(2) + step(1) + step(2) + "{\n" + rows + others + "{}\n\n" + more),
      (std::vector<std::string>{
          "metrics.jsonl: 3 lines are not a line of metrics, the first of them line 4; they are "
          "left out.",
          "metrics.jsonl: 2 lines are of a step that is not after the one before, the first of "
          "them line 2; they are left out.",
          "metrics.jsonl: 2 lines are with experts that are not those of the steps before, the "
          "first of them line 6; they are left out."}));
  EXPECT_EQ(notes_of(header_at(0, "23:00:00.000")),
            std::vector<std::string>{"No step has been logged."});
}

// Loss curves rise by step; a step that comes again is left out, whatever its set.
TEST_F(RunFolder, EvaluationsComeInTheOrderOfTheirSteps) {
  const RunRecord run = read(R"({"step": 0, "val_loss": 4, "val_tokens": 7})"
                             "\n"
                             R"({"step": 2, "val_loss": 3})"
                             "\n"
                             R"({"step": 2, "val_loss": 2})"
                             "\n"
                             R"({"step": 2, "test_loss": 1, "test_tokens": 7})"
                             "\n");
  EXPECT_EQ(run.evaluations.size(), 2U);
  EXPECT_EQ(run.evaluations.at("val_loss").steps, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(run.evaluations.at("val_loss").values, (std::vector<double>{4, 3}));
  EXPECT_EQ(run.evaluations.at("test_loss").steps, std::vector<int64_t>{2});
  EXPECT_EQ(run.evaluations.at("test_loss").values, std::vector<double>{1});
  EXPECT_EQ(run.notes.front(),
            "metrics.jsonl: line 3 is of a step that is not after the one before; it is left out.");
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

// However it is named: its folder, with or without a slash, or the file in it.
TEST_F(RunFolder, IsFoundByEachOfItsNames) {
  read(step_at(1, "23:00:01.000"));
  for (const std::string& path :
       {folder.path(), folder.path() + "/", folder / "x/..", folder / "metrics.jsonl"}) {
    EXPECT_EQ(read_run(path).folder, folder.path()) << path;
  }
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
