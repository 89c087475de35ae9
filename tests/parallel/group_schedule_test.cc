// The ranks of a group show each other their programs before any of them begins.
#include "parallel/group_schedule.h"

#include <atomic>
#include <gtest/gtest.h>
#include <string>

#include "comm/thread_group.h"
#include "parallel/layout.h"
#include "support/errors.h"
#include "support/rank_program.h"

namespace troupe {
namespace {

using testing::expect_phrase;
using testing::message_of;

constexpr std::chrono::milliseconds kScheduleLimit{60'000};

Layout data_parallel(int ranks) {
  LayoutOptions options;
  options.world_size = ranks;
  return Layout(options);
}

TEST(GroupSchedule, OfEqualProgramsIsAccepted) {
  const RankProgram program({7});
  ThreadGroup group(4, kScheduleLimit);
  run_ranks(group, [&](int rank) {
    verify_collectives(group, rank, program.program, data_parallel(4));
    Rank(group, rank, program).interpreter.run();
  });
}

TEST(GroupSchedule, WithoutOneCollectiveIsRefusedBeforeAnyRankBegins) {
  const RankProgram program({7});
  const RankProgram other({7}, /*scan=*/false);
  std::atomic<int> begun{0};
  const std::string message = message_of(ExitStatus::does_not_fit, [&] {
    ThreadGroup group(4, kScheduleLimit);
    run_ranks(group, [&](int rank) {
      verify_collectives(group, rank, (rank == 2 ? other : program).program, data_parallel(4));
      ++begun;
    });
  });
  EXPECT_EQ(begun, 0);
  expect_phrase(message,
                "rank 2 has no collective 0, which in rank 0 is operation 0 (prefix_sum, layer 2, "
                "micro-batch 1");
}

TEST(GroupSchedule, OfAnotherSizeIsRefused) {
  const RankProgram program({7});
  const RankProgram other({8});
  const std::string message = message_of(ExitStatus::does_not_fit, [&] {
    ThreadGroup group(3, kScheduleLimit);
    run_ranks(group, [&](int rank) {
      verify_collectives(group, rank, (rank == 1 ? other : program).program, data_parallel(3));
    });
  });
  expect_phrase(message, "metric f64 [7], of rank 1 operation 2 (all_reduce, layer 2, ");
  expect_phrase(message, "metric f64 [8]");
}

// An operand that is not there is none on the other ranks, either.
TEST(GroupSchedule, ShowsWhichOperandsThereAre) {
  const auto program_of = [](int64_t rows) {
    auto program = std::make_unique<Program>(std::make_shared<const StateTable>());
    Builder builder(*program);
    const ValueId counts = builder.input("counts", DType::i32, {rows});
    program->add_result(prefix_sum(builder, counts, {}, {}, "sums").total);
    return program;
  };
  const auto program = program_of(5);
  const auto other = program_of(6);
  const std::string message = message_of(ExitStatus::does_not_fit, [&] {
    ThreadGroup group(2, kScheduleLimit);
    run_ranks(group, [&](int rank) {
      verify_collectives(group, rank, rank == 1 ? *other : *program, data_parallel(2));
    });
  });
  expect_phrase(message, "(prefix_sum, group dp) of counts i32 [5]");
  EXPECT_EQ(message.find("f32"), std::string::npos) << message;
}

}  // namespace
}  // namespace troupe
