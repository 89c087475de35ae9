// Which GPU a rank has, as far as that can be said on any machine.
#include "train/rank_hardware.h"

#include <gtest/gtest.h>

#include "comm/thread_group.h"
#include "runtime/device_memory.h"
#include "support/errors.h"

namespace troupe::testing {
namespace {

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
    EXPECT_EQ(gpu_of_place(5, 8, 2, 4, is_process), 1);
    EXPECT_EQ(gpu_of_place(7, 8, 1, 8, is_process), 0);
  }
}

TEST(GpuOfPlace, ThreadsNeedAsManyAsTheyAre) {
  EXPECT_EQ(gpu_of_place(0, 4, 3, 1, /*is_process=*/false), std::nullopt);
  EXPECT_EQ(gpu_of_place(0, 5, 2, 2, /*is_process=*/false), std::nullopt);
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
  EXPECT_EQ(message.find("--device cuda: the ranks 0, 2 of this machine have got the same GPU"), 0U)
      << message;
}

}  // namespace
}  // namespace troupe::testing
