// When gradients are called large.
#include "train/gradient_watch.h"

#include <gtest/gtest.h>
#include <limits>

namespace troupe {
namespace {

TEST(GradientWatch, ComparesWithTheLargestOfTheFirstSteps) {
  GradientWatch watch;
  for (int64_t step = 1; step <= GradientWatch::kSamples; ++step) {
    EXPECT_EQ(watch.look(step, step == 50 ? 3.0 : 1.0), "") << step;
  }
  EXPECT_EQ(watch.look(101, 29.9), "");
  const std::string line = watch.look(102, 30.0);
  EXPECT_NE(line.find("step 102"), std::string::npos) << line;
  EXPECT_NE(line.find(" 30."), std::string::npos) << line;
  EXPECT_NE(line.find(" 3 "), std::string::npos) << line;
  EXPECT_EQ(watch.look(103, 29.9), "") << "the large one does not move the limit";
}

TEST(GradientWatch, PassesOverWhatIsNotFinite) {
  GradientWatch watch;
  EXPECT_EQ(watch.look(1, std::numeric_limits<double>::infinity()), "");
  for (int64_t step = 2; step <= 101; ++step) EXPECT_EQ(watch.look(step, 1.0), "");
  EXPECT_EQ(watch.look(102, std::numeric_limits<double>::quiet_NaN()), "");
  EXPECT_NE(watch.look(103, 10.0), "");
}

}  // namespace
}  // namespace troupe
