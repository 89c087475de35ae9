// What a run says of its steps.
#include "train/run_log.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <gtest/gtest.h>
#include <sstream>
#include <string>
#include <string_view>

#include "support/event_file.h"
#include "support/files.h"
#include "support/full_disk.h"

namespace troupe {
namespace {

TEST(RunLog, WarnsOfLargeGradientsWhereThatIsAskedFor) {
  for (const bool asked : {true, false}) {
    ReportSpec spec;
    spec.quiet = true;
    spec.watch_gradients = asked;
    RunLog log(spec, /*leads=*/true);
    StepMetrics metrics;
    metrics.grad_norm = 1;
    ::testing::internal::CaptureStderr();
    for (metrics.step = 1; metrics.step <= GradientWatch::kSamples; ++metrics.step) {
      log.watch_gradients(metrics);
    }
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "none is larger than the others";
    metrics.grad_norm = 2 * GradientWatch::kFactor;
    ::testing::internal::CaptureStderr();
    log.watch_gradients(metrics);
    const std::string warning = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(warning.find("--check-for-large-grads") != std::string::npos, asked) << warning;
  }
}

// Steps that are done again are there once: after a resume those above its step are dropped, and of
// a run from the beginning also the evaluation of step 0.
TEST(RunLog, KeepsOfAnEarlierRunWhatIsNotDoneAgain) {
  const auto kept = [](int64_t step) {
    const testing::TempFolder folder;
    const std::string path = folder / "metrics.jsonl";
    std::ofstream(path) << R"({"step":0,"val_loss":5})"
                        << "\n"
                        << R"({"step":1,"loss":4})"
                        << "\n"
                        << R"({"step":2,"loss":3})"
                        << "\n";
    RunLog log({}, /*leads=*/true);
    RunHeader header;
    header.step = step;
    log.open(folder / "", header, "", {.quiet = true});
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    const std::string lines = text.str();
    return lines.substr(0, lines.find("{\"header\""));
  };
  EXPECT_EQ(kept(0), "");
  EXPECT_EQ(kept(1), "{\"step\":0,\"val_loss\":5}\n{\"step\":1,\"loss\":4}\n");
}

// Of a disk that is full: training goes on, and the warning does not come back with every step.
TEST(RunLog, WarnsOnceOfCurvesThatCannotBeWritten) {
  const testing::TempFolder folder;
  ReportSpec spec;
  spec.quiet = true;
  spec.tensorboard_folder = folder / "curves";
  RunLog log(spec, /*leads=*/true);
  log.open("", {}, "", {.quiet = true});
  ::testing::internal::CaptureStderr();
  {
    const testing::FullDisk disk(4096);
    for (int64_t number = 1; number <= 50; ++number) {
      StepMetrics metrics;
      metrics.step = number;
      log.step(metrics, /*logged=*/true);
    }
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  constexpr std::string_view kWarning = "goes on without --tensorboard-dir";
  ASSERT_NE(said.find(kWarning), std::string::npos) << said;
  EXPECT_EQ(said.find(kWarning), said.rfind(kWarning)) << said;
}

// Tags and values of a folder's event file, in their order.
std::string curves_of(const std::string& folder) {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    for (const std::string& bytes : testing::event_records(entry.path().string())) {
      const testing::Message event(bytes);
      if (event.bytes.count(5) == 0) continue;  // no scalars
      const testing::Message summary(event.bytes.at(5).at(0));
      for (const std::string& each : summary.bytes.at(1)) {
        const testing::Message scalar(each);
        const auto value = static_cast<uint32_t>(scalar.numbers.at(2).at(0));
        text += fmt::format("{}={:g}; ", scalar.bytes.at(1).at(0), std::bit_cast<float>(value));
      }
    }
  }
  return text;
}

StepMetrics some_metrics() {
  StepMetrics metrics;
  metrics.step = 3;
  metrics.loss = 2.5;
  metrics.mtp_losses = {2.75, 3.25};
  metrics.lr = 0.125;
  metrics.grad_norm = 1.5;
  metrics.num_zeros = 17;
  metrics.params_norm = 40;
  metrics.tokens = 300;
  metrics.batch_size = 12;
  metrics.weight_decay = 0.5;
  metrics.tokens_per_s = 200;
  metrics.tflops_per_gpu = 0.75;
  metrics.step_time_s = 6;
  metrics.data_time_s = 2;
  metrics.peak_bytes = 4096;
  metrics.layers = {{.layer = 1, .rows = {30, 10}, .slots = 40, .losses = {{"aux loss", 1.125}}}};
  return metrics;
}

TEST(RunLog, CurvesHaveEachNumberOfAStep) {
  const auto curves = [](bool memory, bool timers) {
    const testing::TempFolder folder;
    ReportSpec spec;
    spec.quiet = true;
    spec.tensorboard_folder = folder.path();
    spec.memory_curve = memory;
    spec.timer_curves = timers;
    RunLog log(spec, /*leads=*/true);
    log.open("", {}, "", {.quiet = true});
    log.step(some_metrics(), /*logged=*/true);
    log.step(some_metrics(), /*logged=*/false);
    log.evaluation(3, {{.name = "a", .loss = 2}, {.name = "", .loss = 3}}, 8);
    log.saved(3, 16);
    log.test(3, {.name = "", .loss = 7});
    return curves_of(folder.path());
  };
  const std::string step =
      "lm loss=2.5; learning-rate=0.125; weight-decay=0.5; batch-size=12; grad-norm=1.5; "
      "tokens=300; tokens-per-second=200; throughput=0.75; iteration-time=6; load_imbalance=1.5; "
      "mtp_1 loss=2.75; mtp_2 loss=3.25; aux loss=1.125; ";
  const std::string rest = "num-zeros=17; params-norm=40; ";
  const std::string evaluation = "lm loss validation/a=2; lm loss validation=3; ";
  EXPECT_EQ(curves(false, false), step + rest + evaluation + "lm loss test=7; ");
  EXPECT_EQ(curves(true, false),
            step + "mem-max-allocated-bytes=4096; " + rest + evaluation + "lm loss test=7; ");
  EXPECT_EQ(curves(false, true), step + "batch-generator-time=2; " +
                                     "forward-backward-optimizer-time=4; " + rest + evaluation +
                                     "evaluate-time=8; save-checkpoint-time=16; lm loss test=7; ");
}

TEST(RunLog, JsonSaysHowFarTheRunCame) {
  const auto printed = [](bool leads, bool json, const RunSummary& summary, const StepMetrics& last,
                          bool evaluated) {
    ReportSpec spec;
    spec.quiet = true;
    spec.json = json;
    RunLog log(spec, leads);
    log.open("", {}, "", {.quiet = true});
    if (evaluated) {
      log.evaluation(3, {{.name = "", .loss = 2}, {.name = "b", .loss = 3}}, 1);
      log.test(3, {.name = "", .loss = 7});
    }
    ::testing::internal::CaptureStdout();
    log.print_json(summary, last);
    std::fflush(stdout);
    std::string text = ::testing::internal::GetCapturedStdout();
    text.erase(std::remove(text.begin(), text.end(), '\n'), text.end());
    return text;
  };
  RunSummary summary{.step = 3,
                     .last_step = 5,
                     .tokens = 300,
                     .parameters = 1000,
                     .active_parameters = 600,
                     .seconds = 1.5};
  EXPECT_EQ(printed(true, false, summary, some_metrics(), true), "") << "not asked for";
  EXPECT_EQ(printed(false, true, summary, some_metrics(), true), "") << "of another rank";
  EXPECT_EQ(printed(true, true, summary, {}, false),
            R"({  "status": "done",  "step": 3,  "last_step": 5,  "tokens": 300,)"
            R"(  "parameters": 1000,  "active_parameters": 600,  "seconds": 1.5,  "loss": null,)"
            R"(  "grad_norm": null,  "tokens_per_s": null,  "tflops_per_gpu": null,)"
            R"(  "load_imbalance": null,  "peak_bytes": null,  "val_loss": null,  "save": null,)"
            R"(  "saved_step": null})");
  summary.interrupted = true;
  summary.folder = "runs/a";
  summary.saved_step = 0;
  StepMetrics first = some_metrics();
  first.step = 1;
  EXPECT_EQ(printed(true, true, summary, first, true),
            R"({  "status": "interrupted",  "step": 3,  "last_step": 5,  "tokens": 300,)"
            R"(  "parameters": 1000,  "active_parameters": 600,  "seconds": 1.5,  "loss": 2.5,)"
            R"(  "grad_norm": 1.5,  "tokens_per_s": 200.0,  "tflops_per_gpu": 0.75,)"
            R"(  "load_imbalance": 1.5,  "peak_bytes": 4096,  "val_loss": 2.0,)"
            R"(  "val_loss/b": 3.0,  "test_loss": 7.0,  "save": "runs/a",  "saved_step": 0})");
}

TEST(RunLog, SpeaksOnlyOnTheRankThatLeads) {
  for (const bool leads : {true, false}) {
    for (const bool quiet : {true, false}) {
      ReportSpec spec;
      spec.quiet = quiet;
      const RunLog log(spec, leads);
      EXPECT_EQ(log.is_quiet(), quiet || !leads);
      ::testing::internal::CaptureStderr();
      log.say("said");
      log.warn("warned");
      EXPECT_EQ(::testing::internal::GetCapturedStderr(),
                std::string(leads && !quiet ? "said\n" : "") + (leads ? "warned\n" : ""));
    }
  }
}

}  // namespace
}  // namespace troupe
