// metrics.jsonl: what stands in a line, what survives when a run goes on, and the numbers derived
// from expert loads.
#include "train/metrics_log.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <gtest/gtest.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "options/options.h"
#include "support/full_disk.h"
#include "train/train_test_support.h"

namespace troupe {
namespace {

using namespace testing;
using nlohmann::json;

class MetricsLogFile : public ::testing::Test {
 protected:
  std::vector<std::string> lines() const {
    std::ifstream in(path);
    std::vector<std::string> all;
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
  }
  // A line without its time, which is checked for its form.
  static json timeless(const std::string& line) {
    json entry = json::parse(line);
    const auto time = entry.at("time").get<std::string>();
    EXPECT_EQ(time.size(), 24U) << time;
    EXPECT_EQ(time.substr(10, 1) + time.substr(19, 1) + time.substr(23), "T.Z") << time;
    EXPECT_GE(time, "2026") << time;
    entry.erase("time");
    return entry;
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> all;
    for (const std::string& line : lines()) all.push_back(json::parse(line).at("step"));
    return all;
  }
  void put(const std::string& text) const { std::ofstream(path, std::ios::app) << text; }
  static StepMetrics step(int64_t number) {
    StepMetrics metrics;
    metrics.step = number;
    metrics.loss = 1.0 / 3.0;
    return metrics;
  }

  TempFolder folder;
  std::string path = folder / "metrics.jsonl";
};

TEST_F(MetricsLogFile, TrainingLine) {
  StepMetrics metrics = step(7);
  metrics.lr = 0.1;
  metrics.grad_norm = 2.5;
  metrics.tokens = 1 << 20;
  metrics.batch_size = 64;
  metrics.weight_decay = 0.5;
  metrics.tokens_per_s = 1e5;
  metrics.tflops_per_gpu = 0.25;
  metrics.step_time_s = 0.5;
  metrics.peak_bytes = uint64_t{5} << 32;
  metrics.layers = {{.layer = 1,
                     .rows = {2, 0, 6, 0},
                     .slots = 16,
                     .entropy = 1.25,
                     .losses = {{"load_balancing_loss", 1.5}, {"z_loss", 3}}},
                    {.layer = 3,
                     .rows = {2, 2, 2, 2},
                     .slots = 8,
                     .entropy = 0.5,
                     .losses = {{"load_balancing_loss", 1.0}, {"z_loss", 1}}}};
  MetricsLog(path, 0).training(metrics);
  ASSERT_EQ(lines().size(), 1U);
  const json expected = json::parse(R"({
    "step": 7, "loss": 0.3333333333333333, "lr": 0.1, "grad_norm": 2.5, "tokens": 1048576,
    "batch_size": 64, "weight_decay": 0.5,
    "tokens_per_s": 1e5, "tflops_per_gpu": 0.25, "step_time_s": 0.5, "peak_bytes": 21474836480,
    "load_imbalance": 3.0, "load_balancing_loss": 1.25, "z_loss": 2.0,
    "experts": [{"layer": 1, "imbalance": 3.0, "max_violation": 2.0, "dead": 2,
                 "dropped": 0.5, "entropy": 1.25, "rows": [2, 0, 6, 0],
                 "load_balancing_loss": 1.5, "z_loss": 3.0},
                {"layer": 3, "imbalance": 1.0, "max_violation": 0.0, "dead": 0,
                 "dropped": 0.0, "entropy": 0.5, "rows": [2, 2, 2, 2],
                 "load_balancing_loss": 1.0, "z_loss": 1.0}]})");
  EXPECT_EQ(timeless(lines()[0]), expected);
  EXPECT_EQ(json::parse(lines()[0])["loss"].get<double>(), 1.0 / 3.0) << "to the last bit";
}

// All that is written of some runs alone, and the line of the test data.
TEST_F(MetricsLogFile, WhatSomeRunsMeasureBesides) {
  StepMetrics metrics = step(2);
  metrics.mtp_losses = {4, 5};
  metrics.planned_step_time_s = 0.25;
  metrics.rooms_lacked = 1;
  metrics.room_needed = 1.5;
  metrics.stash_needed = 1.25;
  metrics.num_zeros = 0;
  metrics.params_norm = 0.5;
  {
    MetricsLog log(path, 0);
    log.training(metrics);
    log.test(2, {"", 3.25, 4096});
  }
  ASSERT_EQ(lines().size(), 2U);
  EXPECT_EQ(timeless(lines()[0]), json::parse(R"({
      "step": 2, "loss": 0.3333333333333333, "lr": 0.0, "grad_norm": 0.0, "tokens": 0,
      "batch_size": 0, "weight_decay": 0.0, "tokens_per_s": 0.0, "tflops_per_gpu": 0.0,
      "step_time_s": 0.0, "peak_bytes": 0, "load_imbalance": 1.0, "planned_step_time_s": 0.25,
      "mtp_1_loss": 4.0, "mtp_2_loss": 5.0, "expert_rooms_lacked": 1, "expert_room_needed": 1.5,
      "expert_stash_needed": 1.25, "num_zeros": 0, "params_norm": 0.5})"));
  EXPECT_EQ(timeless(lines()[1]),
            json::parse(R"({"step": 2, "test_loss": 3.25, "test_tokens": 4096})"));
}

// The loss of indexers is a mean over their layers, which need not have experts.
TEST_F(MetricsLogFile, LossesOfIndexersAreWrittenByLayer) {
  StepMetrics metrics = step(1);
  metrics.indexers = {{.layer = 0, .value = 0.5}, {.layer = 2, .value = 1.5}};
  MetricsLog(path, 0).training(metrics);
  const json line = json::parse(lines().at(0));
  EXPECT_EQ(line["indexer_loss"], 1.0);
  EXPECT_EQ(line["indexers"], json::parse(R"([{"layer": 0, "indexer_loss": 0.5},
                                              {"layer": 2, "indexer_loss": 1.5}])"));
  EXPECT_FALSE(line.contains("experts"));
}

// Of each operand the largest shares of all maps, and those of each map.
TEST_F(MetricsLogFile, SharesOfCodesAreWrittenByMap) {
  StepMetrics metrics = step(1);
  CodeShares one{.layer = 0, .map = "w_qkv"};
  one.operands[0] = {.saturated = 0.25, .zero = 0.5};
  one.operands[1] = {.saturated = 0.125, .zero = 0};
  CodeShares other{.layer = 3, .map = "w_down"};
  other.operands[0] = {.saturated = 0, .zero = 0.75};
  metrics.codes = {one, other};
  MetricsLog(path, 0).training(metrics);
  const json line = json::parse(lines().at(0));
  EXPECT_EQ(line["fp8"], json::parse(R"([
      {"layer": 0, "map": "w_qkv", "input": {"saturated": 0.25, "zero": 0.5},
       "weight": {"saturated": 0.125, "zero": 0.0}},
      {"layer": 3, "map": "w_down", "input": {"saturated": 0.0, "zero": 0.75}}])"));
  EXPECT_EQ(line["fp8_input_saturated"], 0.25);
  EXPECT_EQ(line["fp8_input_zero"], 0.75);
  EXPECT_EQ(line["fp8_weight_saturated"], 0.125);
  EXPECT_EQ(line["fp8_weight_zero"], 0.0);
  EXPECT_FALSE(line.contains("fp8_gradient_saturated"));
}

TEST_F(MetricsLogFile, LossesThatAreNotUsedAreNotWritten) {
  StepMetrics metrics = step(1);
  metrics.skipped = true;
  MetricsLog(path, 0).training(metrics);
  const json line = json::parse(lines().at(0));
  EXPECT_FALSE(line.contains("load_balancing_loss"));
  EXPECT_FALSE(line.contains("z_loss"));
  EXPECT_FALSE(line.contains("experts"));
  EXPECT_FALSE(line.contains("indexer_loss"));
  EXPECT_FALSE(line.contains("indexers"));
  EXPECT_FALSE(line.contains("fp8"));
  for (const char* name :
       {"planned_step_time_s", "mtp_1_loss", "expert_rooms_lacked", "expert_room_needed",
        "expert_stash_needed", "num_zeros", "params_norm"}) {
    EXPECT_FALSE(line.contains(name)) << name;
  }
  EXPECT_EQ(line["load_imbalance"], 1.0);
  EXPECT_EQ(line["skipped"], true);
}

// To the millisecond.
TEST_F(MetricsLogFile, TheTimeIsThatOfTheClock) {
  const auto clock = [] {
    return std::chrono::floor<std::chrono::milliseconds>(std::chrono::system_clock::now());
  };
  const auto before = clock();
  const std::string text = utc_time();
  const auto after = clock();
  std::tm parts{};
  int milliseconds = -1;
  ASSERT_EQ(
      std::sscanf(text.c_str(), "%d-%d-%dT%d:%d:%d.%3dZ", &parts.tm_year, &parts.tm_mon,
                  &parts.tm_mday, &parts.tm_hour, &parts.tm_min, &parts.tm_sec, &milliseconds),
      7)
      << text;
  parts.tm_year -= 1900;
  parts.tm_mon -= 1;
  const auto time = std::chrono::system_clock::from_time_t(timegm(&parts)) +
                    std::chrono::milliseconds(milliseconds);
  EXPECT_LE(before, time) << text;
  EXPECT_LE(time, after) << text;
}

// JSON has no word for NaN; the line must stay one that every reader takes.
TEST_F(MetricsLogFile, NotFiniteIsNull) {
  StepMetrics metrics = step(1);
  metrics.loss = std::numeric_limits<double>::quiet_NaN();
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  MetricsLog(path, 0).training(metrics);
  const json line = json::parse(lines().at(0));
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
}

TEST_F(MetricsLogFile, EvaluationLine) {
  MetricsLog(path, 0).evaluation(20, std::vector<EvaluationResult>{{"", 3.25, 4096}});
  EXPECT_EQ(timeless(lines().at(0)),
            json::parse(R"({"step": 20, "val_loss": 3.25, "val_tokens": 4096})"));
}

TEST_F(MetricsLogFile, SeveralEvaluationSetsShareALine) {
  MetricsLog(path, 0).evaluation(
      20, std::vector<EvaluationResult>{{"books", 3.25, 4096}, {"news", 2.5, 1024}});
  EXPECT_EQ(timeless(lines().at(0)),
            json::parse(R"({"step": 20, "val_loss": 3.25, "val_tokens": 4096,
                            "val_loss/books": 3.25, "val_tokens/books": 4096,
                            "val_loss/news": 2.5, "val_tokens/news": 1024})"));
}

TEST_F(MetricsLogFile, TheHeaderSaysWhatRunsWhere) {
  MetricsLog(path, -1).header({.step = 0,
                               .host = "node1",
                               .device = "cpu",
                               .ranks = 4,
                               .model = "mixtral",
                               .parameters = 46,
                               .active_parameters = 12,
                               .data = {"corpus", "caf\xe9"},
                               .options_file = "runs/a/options.toml",
                               .matmul_limit_tflops = 0.5});
  EXPECT_TRUE(lines().at(0).starts_with(R"({"header":true,"step":0,)")) << lines().at(0);
  json line = timeless(lines().at(0));
  EXPECT_EQ(line.at("version"), kVersion);
  EXPECT_FALSE(line.at("commit").get<std::string>().empty());
  line.erase("version");
  line.erase("commit");
  EXPECT_EQ(line, json::parse(R"({"header": true, "step": 0, "host": "node1", "device": "cpu",
      "ranks": 4, "matmul_limit_tflops": 0.5, "model": "mixtral", "parameters": 46, "active_parameters": 12,
      "data": ["corpus", "caf\ufffd"], "options": "runs/a/options.toml"})"));
}

TEST_F(MetricsLogFile, HeadersOfStartsThatAreDoneAgainAreDropped) {
  for (const int64_t start : {0, 3, 6}) {
    MetricsLog log(path, start);
    log.header({.step = start});
    for (int64_t number = start + 1; number <= start + 3; ++number) log.training(step(number));
  }
  const MetricsLog log(path, 5);
  EXPECT_EQ(steps(), (std::vector<int64_t>{0, 1, 2, 3, 3, 4, 5}));
}

TEST_F(MetricsLogFile, LinesWaitForRoomOnTheDisk) {
  std::vector<std::string> warnings;
  {
    MetricsLog log(path, 0, [&](const std::string& line) { warnings.push_back(line); });
    {
      const testing::FullDisk disk(1000);
      for (int64_t number = 1; number <= 20; ++number) log.training(step(number));
    }
    EXPECT_EQ(warnings.size(), 1U);
    EXPECT_NE(warnings.at(0).find("metrics.jsonl cannot be written: File too large"),
              std::string::npos)
        << warnings.at(0);
    EXPECT_LT(lines().size(), 10U);
    log.training(step(21));
    EXPECT_EQ(warnings.size(), 2U);
  }
  ASSERT_EQ(steps().size(), 21U) << "without a gap, and no line is cut";
  EXPECT_EQ(steps().back(), 21);
}

TEST_F(MetricsLogFile, LinesThatStillWaitAreWrittenAtTheEnd) {
  {
    MetricsLog log(path, 0);
    const testing::FullDisk disk(0);
    log.training(step(1));
    EXPECT_TRUE(steps().empty());
  }
  EXPECT_EQ(steps(), std::vector<int64_t>{1});
}

// 64 MiB of lines wait at most; the lines that are lost are counted once.
TEST_F(MetricsLogFile, LinesAreLostWhereTooManyWait) {
  const RunHeader large{.step = 1, .host = std::string(size_t{2} << 20, 'x')};
  std::vector<std::string> warnings;
  {
    MetricsLog log(path, 0, [&](const std::string& line) { warnings.push_back(line); });
    {
      const testing::FullDisk disk(0);
      for (int i = 0; i < 34; ++i) log.header(large);
    }
    log.training(step(2));
    {
      const testing::FullDisk disk(0);
      log.training(step(3));
    }
    log.training(step(4));
  }
  EXPECT_EQ(steps().size(), 31U + 3U);
  ASSERT_EQ(warnings.size(), 4U);
  EXPECT_TRUE(warnings[1].ends_with(" is written again; 3 lines are lost.")) << warnings[1];
  EXPECT_TRUE(warnings[3].ends_with(" is written again, without a gap.")) << warnings[3];
}

TEST_F(MetricsLogFile, LinesAreThereAtOnce) {
  MetricsLog log(path, 0);
  for (int64_t number = 1; number <= 3; ++number) {
    log.training(step(number));
    EXPECT_EQ(lines().size(), static_cast<size_t>(number));
  }
}

TEST_F(MetricsLogFile, GoingOnDropsLaterLines) {
  {
    MetricsLog log(path, 0);
    for (int64_t number = 1; number <= 6; ++number) {
      log.training(step(number));
      if (number % 2 == 0) log.evaluation(number, std::vector<EvaluationResult>{{"", 1, 1}});
    }
  }
  MetricsLog log(path, 4);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 2, 3, 4, 4}));
  log.training(step(5));
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 2, 3, 4, 4, 5}));
}

TEST_F(MetricsLogFile, KeptLinesAreUntouched) {
  MetricsLog(path, 0).training(step(1));
  const std::string before = lines().at(0);
  put(R"({"step":2})"
      "\n");
  const MetricsLog log(path, 1);
  EXPECT_EQ(lines(), (std::vector<std::string>{before}));
}

TEST_F(MetricsLogFile, ATornLastLineIsDropped) {
  put("{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"lo");
  {
    MetricsLog log(path, 5);
    EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
    log.training(step(2));
  }
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2}));
}

TEST_F(MetricsLogFile, ACompleteLineWithoutItsEndIsTorn) {
  put("{\"step\":1}\n{\"step\":2}");
  const MetricsLog log(path, 5);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
}

TEST_F(MetricsLogFile, LinesThatAreNoMetricsAreDropped) {
  put("garbage\n\n[1]\n{\"loss\":1}\n{\"step\":\"1\"}\n{\"step\":1}\n\xff\xfe\n");
  const MetricsLog log(path, 5);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
}

TEST_F(MetricsLogFile, AFreshRunStartsAnEmptyFile) {
  put("{\"step\":1}\n{\"step\":2}\n");
  const MetricsLog log(path, 0);
  EXPECT_TRUE(lines().empty());
}

TEST_F(MetricsLogFile, NoTemporaryFileStays) {
  put("{\"step\":1}\n{\"step\":2}\n");
  const MetricsLog log(path, 1);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path().filename(), "metrics.jsonl");
    ++files;
  }
  EXPECT_EQ(files, 1);
}

TEST_F(MetricsLogFile, MissingFolderIsAnError) {
  path = folder / "missing/metrics.jsonl";
  try {
    const MetricsLog log(path, 0);
    FAIL() << "nothing was refused";
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::failed);
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
  }
}

TEST(RouterMetrics, ImbalanceIsLargestOverMean) {
  EXPECT_DOUBLE_EQ(
      (RouterMetrics{.layer = 0, .rows = {10, 20, 30, 40}, .slots = 0, .entropy = 0, .losses = {}})
          .imbalance(),
      1.6);
  EXPECT_DOUBLE_EQ(
      (RouterMetrics{.layer = 0, .rows = {0, 0, 0, 5}, .slots = 0, .entropy = 0, .losses = {}})
          .imbalance(),
      4.0);
  EXPECT_EQ((RouterMetrics{.layer = 0, .rows = {0, 0}, .slots = 0, .entropy = 0, .losses = {}})
                .imbalance(),
            1.0);
}

TEST(RouterMetrics, DroppedIsAShareOfTheChoices) {
  EXPECT_EQ((RouterMetrics{.rows = {3, 0}, .slots = 4, .losses = {}}).dropped(), 0.25);
  EXPECT_EQ((RouterMetrics{.rows = {3, 1}, .slots = 4, .losses = {}}).dropped(), 0);
  EXPECT_EQ((RouterMetrics{.rows = {}, .slots = 0, .losses = {}}).dropped(), 0);
}

TEST(RouterMetrics, DeadExperts) {
  EXPECT_EQ(
      (RouterMetrics{.layer = 0, .rows = {0, 1, 0, 2}, .slots = 0, .entropy = 0, .losses = {}})
          .dead(),
      2);
  EXPECT_EQ(
      (RouterMetrics{.layer = 0, .rows = {1, 1}, .slots = 0, .entropy = 0, .losses = {}}).dead(),
      0);
}

}  // namespace
}  // namespace troupe
