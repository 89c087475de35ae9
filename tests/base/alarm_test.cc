// Calls that wait too long end the process with a message; others do not notice.
#include "base/alarm.h"

#include <chrono>
#include <gtest/gtest.h>
#include <thread>

#include "base/error.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;

void wait_for_ever() {
  const Alarm alarm(milliseconds(20), "Rank 3 waits for rank 1.");
  for (;;) std::this_thread::sleep_for(milliseconds(5));
}

TEST(AlarmDeathTest, EndsTheProcessWithItsText) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(wait_for_ever(), testing::ExitedWithCode(static_cast<int>(ExitStatus::failed)),
              "troupe: Rank 3 waits for rank 1. The wait cannot be stopped");
}

TEST(Alarm, IsSilentWhenTheCallReturns) {
  for (int i = 0; i < 100; ++i) {
    const Alarm alarm(std::chrono::hours(1), "never said");
  }
}

}  // namespace
}  // namespace troupe
