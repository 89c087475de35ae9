// What is proposed where a step does not fit.
#include "train/memory_remedies.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "options/command_line.h"

namespace troupe {
namespace {

// More ranks come last, and on a CPU more machines: those of this one would share its memory.
TEST(MemoryRemedies, EndWithMoreMachinesThatHaveAsMuchMemory) {
  const std::vector<std::string> words = {"plan", "--model", "quickstart", "--seq-length", "128"};
  const Options options = parse_command_line(words).options;
  const uint64_t plenty = uint64_t{1} << 40;
  const std::vector<MemoryRemedy> all = find_remedies(options, /*rank=*/0, plenty, plenty);
  ASSERT_FALSE(all.empty());
  const MemoryRemedy& machines = all.back();
  EXPECT_EQ(machines.flags, "--ranks 2 --use-megatron-fsdp (on as many machines of this size)");
  EXPECT_GT(machines.bytes, 0U);
  EXPECT_LE(machines.bytes, plenty);
}

}  // namespace
}  // namespace troupe
