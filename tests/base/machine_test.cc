#include "base/machine.h"

#include <array>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/sysinfo.h>
#include <unistd.h>

namespace troupe::testing {
namespace {

TEST(Machine, UsableCoresAreThoseOfTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(usable_cores(), CPU_COUNT(&before));
  int core = 0;
  while (!CPU_ISSET(core, &before)) ++core;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(usable_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(installed_cores(), get_nprocs());
}

// The kernel counts in KiB.
TEST(Machine, AvailableMemoryIsAPartOfAllInBytes) {
  struct sysinfo all {};
  ASSERT_EQ(sysinfo(&all), 0);
  const uint64_t available = available_memory_bytes();
  EXPECT_GT(available, uint64_t{1} << 20);
  EXPECT_LE(available, uint64_t{all.totalram} * all.mem_unit);
  EXPECT_EQ(available % 1024, 0U);
}

TEST(Machine, HasTheNameThatItKnowsItselfBy) {
  std::array<char, 256> name{};
  ASSERT_EQ(gethostname(name.data(), name.size() - 1), 0);
  EXPECT_EQ(host_name(), name[0] == '\0' ? "localhost" : name.data());
}

}  // namespace
}  // namespace troupe::testing
