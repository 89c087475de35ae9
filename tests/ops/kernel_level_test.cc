// The level of the CPU kernels: what is chosen, and what is refused.
#include "ops/kernel_level.h"

#include <gtest/gtest.h>
#include <string>

#include "support/errors.h"

namespace troupe {
namespace {

TEST(KernelLevel, ChoosesTheHighestThatTheProcessorHas) {
  choose_kernel_level("");
  EXPECT_TRUE(processor_has(kernel_level()));
  bool is_above = false;
  for (const std::string_view level : kernel_levels()) {
    EXPECT_FALSE(is_above && processor_has(level)) << level;
    is_above = is_above || level == kernel_level();
  }
  EXPECT_TRUE(is_above);
}

TEST(KernelLevel, TakesEachThatTheProcessorHas) {
  for (const std::string_view level : kernel_levels()) {
    if (!processor_has(level)) continue;
    choose_kernel_level(level);
    EXPECT_EQ(kernel_level(), level);
  }
  choose_kernel_level("");
}

TEST(KernelLevel, RefusesWhatTheProgramDoesNotHave) {
  const std::string_view before = kernel_level();
  testing::expect_phrase(
      testing::message_of(ExitStatus::bad_request, [] { choose_kernel_level("x86-64-v9"); }),
      "There are no CPU kernels for x86-64-v9 in this program: it has them for ");
  EXPECT_EQ(kernel_level(), before);
}

}  // namespace
}  // namespace troupe
