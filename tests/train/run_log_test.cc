// What a run says of its steps.
#include "train/run_log.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace troupe
