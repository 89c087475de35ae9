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

// What is done at once when nothing has to be saved.
TEST(InterruptDeathTest, EverySignalEndsAtOnce) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
    SCOPED_TRACE(signal);
    EXPECT_EXIT(
        {
          end_at_once_when_interrupted(/*quiet=*/false);
          raise(signal);
          std::_Exit(0);
        },
        ::testing::ExitedWithCode(130), "^\ntroupe: interrupted\n$");
  }
}

TEST(InterruptDeathTest, QuietProcessesEndWithoutAWord) {
  EXPECT_EXIT(
      {
        end_at_once_when_interrupted(/*quiet=*/true);
        raise(SIGINT);
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(130), "^$");
  EXPECT_EXIT(
      {
        install_interrupt_handlers(/*quiet=*/true);
        raise(SIGINT);
        std::_Exit(interrupt_requested() ? 3 : 0);
      },
      ::testing::ExitedWithCode(3), "^$");
}

TEST(InterruptDeathTest, AHangupAsksOnceHoweverOftenItComes) {
  EXPECT_EXIT(
      {
        install_interrupt_handlers();
        raise(SIGHUP);
        raise(SIGHUP);
        std::_Exit(interrupt_requested() ? 3 : 0);
      },
      ::testing::ExitedWithCode(3), "^$");
}

// nohup
TEST(InterruptDeathTest, AHangupThatIsIgnoredStaysIgnored) {
  EXPECT_EXIT(
      {
        std::signal(SIGHUP, SIG_IGN);
        end_at_once_when_interrupted(/*quiet=*/false);
        raise(SIGHUP);
        std::_Exit(3);
      },
      ::testing::ExitedWithCode(3), "^$");
}

TEST(InterruptDeathTest, BrokenPipesAreErrorsOfTheWrite) {
  EXPECT_EXIT(
      {
        ignore_broken_pipes();
        raise(SIGPIPE);
        std::_Exit(3);
      },
      ::testing::ExitedWithCode(3), "^$");
}

}  // namespace
}  // namespace troupe
