// Which GPU a rank has, as far as that can be said on any machine.
#include <gtest/gtest.h>

#include "parallel/thread_group.h"
#include "support/errors.h"
#include "train/layout_options.h"

namespace troupe::testing {
namespace {

TEST(GpuOfRank, IsTheFirstForARunOfOneRank) {
  EXPECT_EQ(gpu_of_rank(nullptr, 0, 1), 0);
}

TEST(GpuOfRank, RefusesMoreRanksThanGpus) {
  const ThreadGroup group(500);
  const std::string message =
      message_of(ExitStatus::bad_request, [&] { gpu_of_rank(&group, 0, 1); });
  EXPECT_EQ(message.find("--device cuda: "), 0U) << message;
}

}  // namespace
}  // namespace troupe::testing
