// The first signal asks, the second one ends the process.
#include "train/interrupt.h"

#include <csignal>
#include <cstdlib>
#include <gtest/gtest.h>

namespace troupe {
namespace {

TEST(InterruptDeathTest, FirstSignalAsks) {
  EXPECT_EXIT(
      {
        install_interrupt_handlers();
        if (interrupt_requested()) std::_Exit(1);
        raise(SIGINT);
        std::_Exit(interrupt_requested() ? 0 : 2);
      },
      ::testing::ExitedWithCode(0), "interrupt again to stop at once");
}

TEST(InterruptDeathTest, SecondSignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        install_interrupt_handlers();
        raise(SIGTERM);
        raise(SIGINT);
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(130), "stop at once");
}

}  // namespace
}  // namespace troupe
