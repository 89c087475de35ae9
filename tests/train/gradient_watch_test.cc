// When gradients are called large, and which of those that are not finite are named.
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
  EXPECT_EQ(watch.look(102, 30.0),
            "Warning: step 102: the norm of the gradients is 30. The largest of the first 100 "
            "steps of this run was 3 (--check-for-large-grads).");
  EXPECT_EQ(watch.look(103, 29.9), "") << "the large one does not move the limit";
}

TEST(GradientWatch, PassesOverWhatIsNotFinite) {
  GradientWatch watch;
  EXPECT_EQ(watch.look(1, std::numeric_limits<double>::infinity()), "");
  for (int64_t step = 2; step <= 101; ++step) EXPECT_EQ(watch.look(step, 1.0), "");
  EXPECT_EQ(watch.look(102, std::numeric_limits<double>::quiet_NaN()), "");
  EXPECT_NE(watch.look(103, 10.0), "");
}

TEST(ListGradients, NamesThree) {
  EXPECT_EQ(list_gradients({}), "the sum of all");
  EXPECT_EQ(list_gradients({"a"}), "a");
  EXPECT_EQ(list_gradients({"a", "b", "c"}), "a, b, c");
  EXPECT_EQ(list_gradients({"a", "b", "c", "d"}), "a, b, c and 1 more");
  EXPECT_EQ(list_gradients({"a", "b", "c", "d", "e"}), "a, b, c and 2 more");
}

}  // namespace
}  // namespace troupe
