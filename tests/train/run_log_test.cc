// What a run says of its steps.
#include "train/run_log.h"

#include <fstream>
#include <gtest/gtest.h>
#include <sstream>
#include <string_view>

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

}  // namespace
}  // namespace troupe
