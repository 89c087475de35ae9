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

// Whether the room for experts is not limited yet, or is by more than is usual.
TEST(MemoryRemedies, LessRoomForExpertsWhereTheyHaveMore) {
  const auto proposes = [](std::vector<std::string> limit) {
    std::vector<std::string> words = {"plan",       "--model",
                                      "quickstart", "--seq-length",
                                      "128",        "--micro-batch-size",
                                      "8",          "--ranks",
                                      "4",          "--expert-model-parallel-size",
                                      "4"};
    words.insert(words.end(), limit.begin(), limit.end());
    const Options options = parse_command_line(words).options;
    const uint64_t plenty = uint64_t{1} << 40;
    bool found = false;
    for (const MemoryRemedy& each : find_remedies(options, /*rank=*/0, plenty, plenty)) {
      found |= each.flags == "--moe-expert-rank-capacity-factor 1.5";
    }
    return found;
  };
  EXPECT_TRUE(proposes({}));
  EXPECT_TRUE(proposes({"--moe-expert-rank-capacity-factor", "0"}));
  EXPECT_TRUE(proposes({"--moe-expert-rank-capacity-factor", "4"}));
  EXPECT_FALSE(proposes({"--moe-expert-rank-capacity-factor", "1.25"}));
}

}  // namespace
}  // namespace troupe
