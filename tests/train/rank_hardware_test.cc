// What of a machine a rank has, threads and a GPU, as far as that can be said on any machine.
#include "train/rank_hardware.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <utility>
#include <vector>

#include "base/machine.h"
#include "comm/thread_group.h"
#include "runtime/device_memory.h"
#include "support/errors.h"
#include "support/fixed_group.h"

namespace troupe::testing {
namespace {

TEST(RanksThatShare, AreThoseOfTheMachineOrTheGpu) {
  const DeviceSpec spec{.ranks = 6, .ranks_per_gpu = 4, .threads = 9};
  EXPECT_EQ(ranks_that_share(spec, nullptr, Device::cpu), 6);
  EXPECT_EQ(ranks_that_share(spec, nullptr, Device::cuda), 4);
  const FixedGroup two({.own_ranks = {1}, .ranks = 2});
  EXPECT_EQ(ranks_that_share(spec, &two, Device::cpu), 2) << "--threads are those of a machine";
  EXPECT_EQ(ranks_that_share(spec, &two, Device::cuda), 2);
}

TEST(ThreadsOfRank, AreAnEqualPartAndAtLeastOne) {
  const auto threads = [](int32_t all, int32_t ranks) {
    return threads_of_rank({.ranks = ranks, .threads = all}, nullptr);
  };
  EXPECT_EQ(threads(9, 4), 2);
  EXPECT_EQ(threads(8, 4), 2);
  EXPECT_EQ(threads(7, 4), 1);
  EXPECT_EQ(threads(3, 4), 1);
}

// Processes that have the cores of a machine to themselves, and those that have the same ones.
TEST(RanksThatShare, AreThoseOfAProcessThatIsBoundToItsCores) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const auto sharing = [](std::vector<int32_t> own, int32_t ranks) {
    const FixedGroup group({.own_ranks = std::move(own), .ranks = ranks});
    return ranks_that_share({.ranks = ranks}, &group, Device::cpu);
  };
  // Each with one core: as many as there are, or one too many.
  const int cores = installed_cores();
  EXPECT_EQ(sharing({0}, cores), 1);
  EXPECT_EQ(sharing({0}, cores + 1), cores + 1);
  EXPECT_EQ(sharing({0, 1}, 2 * cores), 2);
  EXPECT_EQ(sharing({0, 1}, 2 * cores + 2), 2 * cores + 2);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(GpuOfRank, IsTheFirstForARunOfOneRankWhereThereIsOne) {
  if (why_no_gpu().empty()) {
    EXPECT_EQ(gpu_of_rank(nullptr, 0, 1), 0);
    return;
  }
  const std::string message =
      message_of(ExitStatus::bad_request, [] { gpu_of_rank(nullptr, 0, 1); });
  EXPECT_NE(message.find("Use --device cpu."), std::string::npos) << message;
}

TEST(GpuOfRank, RefusesMoreRanksThanGpus) {
  const ThreadGroup group(500);
  const std::string message =
      message_of(ExitStatus::bad_request, [&] { gpu_of_rank(&group, 0, 1); });
  EXPECT_EQ(message.find("--device cuda: "), 0U) << message;
}

TEST(GpuOfPlace, IsTheNextOneOrShared) {
  for (const bool is_process : {false, true}) {
    EXPECT_EQ(gpu_of_place(3, 4, 4, 1, is_process), 3);
    EXPECT_EQ(gpu_of_place(3, 4, 8, 1, is_process), 3);
    EXPECT_EQ(gpu_of_place(4, 5, 3, 2, is_process), 2);
    EXPECT_EQ(gpu_of_place(5, 8, 2, 4, is_process), 1);
    EXPECT_EQ(gpu_of_place(7, 8, 1, 8, is_process), 0);
    EXPECT_EQ(gpu_of_place(8, 9, 3, 4, is_process), 2) << "the last one has one rank";
  }
}

TEST(GpuOfPlace, ThreadsNeedAsManyAsTheyAre) {
  const auto refusal = [](int32_t ranks, int32_t gpus, int32_t ranks_per_gpu) {
    return message_of(ExitStatus::bad_request,
                      [&] { gpu_of_place(0, ranks, gpus, ranks_per_gpu, /*is_process=*/false); });
  };
  EXPECT_EQ(refusal(4, 3, 1),
            "--device cuda: 4 ranks on this machine need 4 GPUs, and it has 3. Use as many ranks "
            "as there are GPUs, or let them share: --ranks-per-gpu 2.");
  EXPECT_EQ(refusal(5, 2, 2),
            "--device cuda: 5 ranks on this machine need 3 GPUs, and it has 2. Use as many ranks "
            "as there are GPUs, or let them share: --ranks-per-gpu 3.");
  EXPECT_EQ(refusal(6, 2, 2),
            "--device cuda: 6 ranks on this machine need 3 GPUs, and it has 2. Use as many ranks "
            "as there are GPUs, or let them share: --ranks-per-gpu 3.");
}

// As many processes as a machine has GPUs, of which each sees one, or some.
TEST(GpuOfPlace, ProcessesTakeOneOfThoseThatTheySee) {
  EXPECT_EQ(gpu_of_place(3, 4, 1, 1, /*is_process=*/true), 0);
  EXPECT_EQ(gpu_of_place(3, 4, 2, 1, /*is_process=*/true), 1);
}

TEST(RequireOwnGpu, RefusesRanksThatHaveGotTheSame) {
  ThreadGroup group(3, std::chrono::seconds(60));
  const std::vector<uint64_t> gpus = {7, 8, 7};
  run_ranks(group, [&](int rank) { require_own_gpu(group, rank, gpus[rank], 2); });
  const std::string message = message_of(ExitStatus::bad_request, [&] {
    run_ranks(group, [&](int rank) { require_own_gpu(group, rank, gpus[rank], 1); });
  });
  EXPECT_EQ(message,
            "--device cuda: the ranks 0, 2 of this machine have got the same GPU. Start as many "
            "ranks as there are GPUs, let each process see all of them or one of its own "
            "(CUDA_VISIBLE_DEVICES), or let ranks share: --ranks-per-gpu 2.");
}

}  // namespace
}  // namespace troupe::testing
