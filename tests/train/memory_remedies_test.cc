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

// Where its activations alone are too many for each of more ranks, they make them again.
TEST(MemoryRemedies, MoreMachinesRecomputeWhereTheyMust) {
  const auto last = [](std::vector<std::string> more) {
    std::vector<std::string> words = {"plan",   "--model",      "mixtral-8x7b",
                                      "--bf16", "--seq-length", "4096"};
    words.insert(words.end(), more.begin(), more.end());
    const uint64_t gib = uint64_t{1} << 30;
    const Options options = parse_command_line(words).options;
    return find_remedies(options, /*rank=*/0, 813 * gib, 23 * gib).back().flags;
  };
  const std::string ranks = "--ranks 64 --use-megatron-fsdp";
  const std::string recompute =
      "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1";
  const std::string machines = " (on as many machines of this size)";
  EXPECT_EQ(last({}), ranks + " " + recompute + machines);
  EXPECT_EQ(last({"--recompute-granularity", "full", "--recompute-method", "uniform",
                  "--recompute-num-layers", "1"}),
            ranks + machines);
  EXPECT_EQ(last({"--recompute-granularity", "selective"}).find(ranks), std::string::npos);
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

// What is on already, be it chosen by itself, is not proposed.
TEST(MemoryRemedies, AStashWhereThereIsNone) {
  const auto proposes = [](bool has_stash) {
    const std::vector<std::string> words = {
        "plan", "--model", "quickstart", "--seq-length",
        "128",  "--ranks", "4",          "--expert-model-parallel-size",
        "4"};
    Options options = parse_command_line(words).options;
    if (has_stash) options.moe_paged_stash = true;
    const uint64_t plenty = uint64_t{1} << 40;
    bool found = false;
    for (const MemoryRemedy& each : find_remedies(options, /*rank=*/0, plenty, plenty)) {
      found |= each.flags == "--moe-paged-stash";
    }
    return found;
  };
  EXPECT_TRUE(proposes(false));
  EXPECT_FALSE(proposes(true));
}

// Modules that the model has.
TEST(MemoryRemedies, ModulesToComputeAgain) {
  const auto modules = [](std::vector<std::string> model) {
    model.insert(model.begin(), {"plan", "--bf16", "--seq-length", "128", "--model"});
    const Options options = parse_command_line(model).options;
    const uint64_t plenty = uint64_t{1} << 50;
    for (const MemoryRemedy& each : find_remedies(options, /*rank=*/0, plenty, plenty)) {
      const std::string begin = "--recompute-granularity selective --recompute-modules ";
      if (each.flags.starts_with(begin)) return each.flags.substr(begin.size());
    }
    return std::string();
  };
  EXPECT_EQ(modules({"quickstart"}), "layernorm moe_act moe_permute");
  EXPECT_EQ(modules({"deepseek-v3", "--num-layers", "4", "--num-experts", "16"}),
            "layernorm moe_act moe_permute mla_up_proj mlp");
  EXPECT_EQ(modules({"quickstart", "--recompute-granularity", "selective"}), "");
}

std::string remedies(const std::vector<std::string>& more, uint64_t bytes, uint64_t available,
                     int32_t rank = 0) {
  std::vector<std::string> words = {"plan", "--model",   "quickstart", "--seq-length",
                                    "128",  "--threads", "2"};
  words.insert(words.end(), more.begin(), more.end());
  return describe_remedies(parse_command_line(words).options, rank, bytes, available);
}

TEST(MemoryRemedies, AreSaidWhole) {
  const uint64_t gib = uint64_t{1} << 30;
  // All that can be asked for, and more ranks.
  EXPECT_EQ(remedies({"--micro-batch-size", "6", "--ranks", "4", "--expert-model-parallel-size",
                      "2", "--compute-dtype", "fp64"},
                     gib, gib, 1),
            "What makes the 1.00 GiB of rank 1 smaller, one by one (docs/memory.md):\n"
            "    151.41 MiB  --compute-dtype fp32\n"
            "    186.19 MiB  --recompute-granularity full --recompute-method uniform\n"
            "                --recompute-num-layers 1\n"
            "    213.20 MiB  --micro-batch-size 3\n"
            "    239.36 MiB  --use-megatron-fsdp\n"
            "    260.22 MiB  --moe-paged-stash\n"
            "    262.13 MiB  --recompute-granularity selective --recompute-modules layernorm\n"
            "                moe_act moe_permute\n"
            "    267.79 MiB  --moe-expert-rank-capacity-factor 1.5\n"
            "    269.90 MiB  --use-distributed-optimizer\n"
            "    302.68 MiB  --use-precision-aware-optimizer --exp-avg-dtype bf16\n"
            "                --exp-avg-sq-dtype bf16\n"
            "    210.43 MiB  --ranks 8 --use-megatron-fsdp (on as many machines of this size)\n");
  // What saves less than a twentieth is not said, and nothing of what is done already.
  EXPECT_EQ(remedies({"--micro-batch-size", "1", "--ranks", "2", "--use-distributed-optimizer",
                      "--recompute-granularity", "full", "--recompute-method", "uniform",
                      "--recompute-num-layers", "1"},
                     60'000'000, 1),
            "Use a shorter --seq-length, a smaller model, or more ranks that share it "
            "(docs/layouts.md).\n");
  EXPECT_EQ(remedies({"--micro-batch-size", "2", "--optimizer", "muon", "--ranks", "2"}, gib, 1),
            "What makes the 1.00 GiB of rank 0 smaller, one by one (docs/memory.md):\n"
            "     90.87 MiB  --optimizer dist_muon\n"
            "     94.00 MiB  --recompute-granularity full --recompute-method uniform\n"
            "                --recompute-num-layers 1\n"
            "     96.44 MiB  --micro-batch-size 1\n"
            "    101.03 MiB  --recompute-granularity selective --recompute-modules layernorm\n"
            "                moe_act moe_permute\n"
            "    105.13 MiB  --use-precision-aware-optimizer --exp-avg-dtype bf16\n"
            "                --exp-avg-sq-dtype bf16\n");
  EXPECT_EQ(remedies({}, 1000, 1),
            "Use a shorter --seq-length, a smaller model, or more ranks that share it "
            "(docs/layouts.md).\n");
  // On GPUs what costs least time comes first.
  EXPECT_EQ(remedies({"--gpus", "8xh100", "--micro-batch-size", "2", "--bf16"}, gib, gib),
            "What makes the 1.00 GiB of rank 0 smaller, one by one, what costs least time\n"
            "  first (docs/memory.md):\n"
            "     95.46 MiB  --use-distributed-optimizer (-9 % time)\n"
            "    142.47 MiB  --use-precision-aware-optimizer --exp-avg-dtype bf16\n"
            "                --exp-avg-sq-dtype bf16 (-2 % time)\n"
            "    169.14 MiB  --recompute-granularity selective --recompute-modules layernorm\n"
            "                moe_act moe_permute (+5 % time)\n"
            "    165.58 MiB  --recompute-granularity full --recompute-method uniform\n"
            "                --recompute-num-layers 1 (+16 % time)\n"
            "     61.25 MiB  --use-megatron-fsdp (+74 % time)\n"
            "    166.81 MiB  --micro-batch-size 1 (+96 % time)\n"
            "     84.61 MiB  --optimizer-cpu-offload (+229 % time) (86.78 MiB on the host)\n"
            "     57.62 MiB  --gpus 16xh100 --use-megatron-fsdp (each with a GPU of its own)\n");
}

// More ranks are tried from where an even share fits, and a batch grows with them.
TEST(MemoryRemedies, AsManyRanksAsItTakes) {
  const auto ranks = [](uint64_t bytes, uint64_t available) {
    const std::string text = remedies({"--global-batch-size", "1"}, bytes, available);
    const size_t at = text.find("--ranks ");
    return at == std::string::npos ? "" : text.substr(at + 8, text.find(' ', at + 8) - at - 8);
  };
  const uint64_t gib = uint64_t{1} << 30;
  EXPECT_EQ(ranks(gib, gib / 2), "2");
  EXPECT_EQ(ranks(2 * gib, gib / 2), "4");
  EXPECT_EQ(ranks(512 * gib, gib / 2), "1024");
  EXPECT_EQ(ranks(1024 * gib, gib / 2), "") << "of 1024 at most";
}

TEST(MemoryRemedies, SaveATwentiethAtLeast) {
  const std::vector<std::string> words = {"plan", "--model", "quickstart", "--seq-length", "128"};
  const Options options = parse_command_line(words).options;
  const uint64_t plenty = uint64_t{1} << 40;
  const MemoryRemedy best = find_remedies(options, /*rank=*/0, plenty, plenty).front();
  const auto is_said = [&](uint64_t bytes) {
    for (const MemoryRemedy& each : find_remedies(options, 0, bytes, plenty)) {
      if (each.flags == best.flags) return true;
    }
    return false;
  };
  const auto least = static_cast<uint64_t>(static_cast<double>(best.bytes) / 0.95);
  EXPECT_TRUE(is_said(least + 2));
  EXPECT_FALSE(is_said(least - 2));
}

}  // namespace
}  // namespace troupe
