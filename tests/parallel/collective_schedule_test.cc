// The check of all ranks' collectives and messages, on small programs written by hand: whatever
// would make ranks wait for each other forever is refused, and the refusal says who waits for
// which rank.
#include "parallel/collective_schedule.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "ops/elementwise/fill/fill.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/pipeline_message/pipeline_message.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// The program of one rank, line by line.
class ScheduledRank {
 public:
  ScheduledRank() : program(std::make_shared<const StateTable>()), builder(program) {}

  ScheduledRank& sum(RankGroup group, int64_t size = 1) {
    const ValueId metric = builder.metric("metric", DType::f64, {size});
    all_reduce(builder, {{metric}}, {.group = group});
    return *this;
  }
  ScheduledRank& send(int32_t to, int64_t size = 4, RankGroup group = RankGroup::pp) {
    sent.push_back(fill(builder, 1, DType::f32, {size}, "stream"));
    troupe::send(builder, sent.back(), {.group = group, .peer = to});
    return *this;
  }
  // The send with that number.
  ScheduledRank& finish(int32_t to, size_t number, RankGroup group = RankGroup::pp) {
    finish_send(builder, sent[number], {.group = group, .peer = to});
    return *this;
  }
  ScheduledRank& receive(int32_t from, int64_t size = 4, RankGroup group = RankGroup::pp) {
    troupe::receive(builder,
                    {.way = {.group = group, .peer = from}, .dtype = DType::f32, .shape = {size}},
                    "received");
    return *this;
  }

  Program program;
  Builder builder;
  std::vector<ValueId> sent;
};

// Empty: nothing is wrong.
std::string refusal(std::vector<ScheduledRank>& ranks, const Layout& layout) {
  std::vector<const Program*> programs;
  for (const ScheduledRank& rank : ranks) programs.push_back(&rank.program);
  try {
    verify_collectives(programs, layout);
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::does_not_fit);
    return error.what();
  }
  return {};
}

void expect_says(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

Layout pipeline_of(int32_t ranks) {
  return Layout({.world_size = ranks, .pipeline_parallel = ranks});
}

// 2 x 2: tp {0 1} {2 3}, dp {0 2} {1 3}.
Layout square() {
  return Layout({.world_size = 4, .tensor_parallel = 2});
}

// 2 x 2 ranks, tp {0 1} {2 3}, pp {0 2} {1 3}, of which both of a tp group share a program.
std::string refusal_of_classes(const std::vector<ScheduledRank>& programs,
                               const std::vector<int32_t>& program_of_rank) {
  std::vector<CollectiveTrace> traces;
  for (const ScheduledRank& rank : programs) traces.push_back(trace_collectives(rank.program));
  const Layout layout({.world_size = 4, .tensor_parallel = 2, .pipeline_parallel = 2});
  try {
    verify_collectives(traces, program_of_rank, layout);
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::does_not_fit);
    return error.what();
  }
  return {};
}

TEST(CollectiveScheduleCheck, RanksShareProgramsInTheirOwnGroups) {
  std::vector<ScheduledRank> programs(2);
  programs[0].sum(RankGroup::tp, 3).send(1).receive(1, 8).finish(1, 0).sum(RankGroup::world);
  programs[1].receive(0).sum(RankGroup::tp, 5).send(0, 8).finish(0, 0).sum(RankGroup::world);
  EXPECT_EQ(refusal_of_classes(programs, {0, 0, 1, 1}), "");
}

TEST(CollectiveScheduleCheck, RefusesACollectiveLeftOutOfOneOfManyRanks) {
  std::vector<ScheduledRank> programs(3);
  for (ScheduledRank& rank : programs) rank.builder.place = {.layer = 0};
  programs[0].sum(RankGroup::tp).send(1).finish(1, 0).sum(RankGroup::world);
  programs[1].sum(RankGroup::tp).receive(0).sum(RankGroup::world);
  programs[2].receive(0).sum(RankGroup::world);  // as the one before, except one collective
  EXPECT_EQ(refusal_of_classes(programs, {0, 0, 1, 1}), "");
  expect_says(refusal_of_classes(programs, {0, 0, 1, 2}),
              "rank 3 has no collective 0, which in rank 2 is operation 0 (all_reduce, layer 0, "
              "group tp) of metric f64 [1]");
}

TEST(CollectiveScheduleCheck, RefusesSharedProgramsThatWaitForEver) {
  std::vector<ScheduledRank> programs(2);
  programs[0].send(1).finish(1, 0).sum(RankGroup::world);
  programs[1].sum(RankGroup::world).receive(0);
  const std::string message = refusal_of_classes(programs, {0, 0, 1, 1});
  expect_says(message, "rank 1 waits in operation 2 (finish_send, group pp)");
  expect_says(message,
              "rank 3 waits in operation 0 (all_reduce, group world) of metric f64 [1] "
              "for rank 0, rank 1");
  // Who shares a program still has messages of its own.
  std::vector<ScheduledRank> lost(3);
  lost[0].send(1).finish(1, 0);
  lost[1].receive(0);
  expect_says(refusal_of_classes(lost, {0, 0, 1, 2}),
              "rank 3 never receives message 0 from rank 1");
}

TEST(CollectiveScheduleCheck, AcceptsMessagesAndGroupsThatFit) {
  std::vector<ScheduledRank> ranks(2);
  ranks[0].send(1).receive(1, 8).finish(1, 0).sum(RankGroup::world);
  ranks[1].receive(0).send(0, 8).finish(0, 0).sum(RankGroup::world);
  EXPECT_EQ(refusal(ranks, pipeline_of(2)), "");
  // Both send before they receive: no send waits.
  std::vector<ScheduledRank> both(2);
  both[0].send(1).receive(1).finish(1, 0);
  both[1].send(0).receive(0).finish(0, 0);
  EXPECT_EQ(refusal(both, pipeline_of(2)), "");
}

TEST(CollectiveScheduleCheck, ComparesWithinEachGroupAlone) {
  std::vector<ScheduledRank> ranks(4);
  // The two tp groups may differ; the dp groups run the same.
  for (size_t rank : {0, 1}) ranks[rank].sum(RankGroup::tp, 3).sum(RankGroup::dp);
  for (size_t rank : {2, 3}) ranks[rank].sum(RankGroup::dp).sum(RankGroup::tp, 5);
  EXPECT_EQ(refusal(ranks, square()), "");
}

TEST(CollectiveScheduleCheck, RefusesAMissingCollective) {
  std::vector<ScheduledRank> ranks(4);
  for (size_t rank : {0, 1, 2}) ranks[rank].sum(RankGroup::tp);
  expect_says(refusal(ranks, square()),
              "rank 3 has no collective 0, which in rank 2 is operation 0 (all_reduce, group tp) "
              "of metric f64 [1]");
}

TEST(CollectiveScheduleCheck, RefusesACollectiveOfAnotherSize) {
  std::vector<ScheduledRank> ranks(4);
  for (ScheduledRank& rank : ranks) rank.sum(RankGroup::tp);
  for (size_t rank : {0, 1, 2}) ranks[rank].sum(RankGroup::dp, 6);
  ranks[3].sum(RankGroup::dp, 7);
  expect_says(refusal(ranks, square()),
              "collective 0 of rank 1 is operation 1 (all_reduce, group dp) of metric f64 [6], of "
              "rank 3 operation 1 (all_reduce, group dp) of metric f64 [7]");
}

// Every group runs the same list; but who waits in one group is missing in the other.
TEST(CollectiveScheduleCheck, RefusesGroupsInCrossingOrders) {
  std::vector<ScheduledRank> ranks(4);
  for (size_t rank : {0, 3}) ranks[rank].sum(RankGroup::tp).sum(RankGroup::dp);
  for (size_t rank : {1, 2}) ranks[rank].sum(RankGroup::dp).sum(RankGroup::tp);
  const std::string message = refusal(ranks, square());
  expect_says(message,
              "rank 0 waits in operation 0 (all_reduce, group tp) of metric f64 [1] for "
              "rank 1; rank 1 waits in operation 0 (all_reduce, group dp)");
  expect_says(message,
              "rank 3 waits in operation 0 (all_reduce, group tp) of metric f64 [1] for "
              "rank 2");
}

TEST(CollectiveScheduleCheck, RefusesAMessageThatWaitsForACollective) {
  std::vector<ScheduledRank> ranks(3);
  for (ScheduledRank& rank : ranks) rank.builder.place = {.layer = 5, .micro_batch = 2};
  ranks[0].sum(RankGroup::world).send(1).finish(1, 0);
  ranks[1].receive(0).sum(RankGroup::world);
  ranks[2].sum(RankGroup::world);
  expect_says(refusal(ranks, pipeline_of(3)),
              "rank 0 waits in operation 0 (all_reduce, layer 5, micro-batch 2, group world) of "
              "metric f64 [1] for rank 1; rank 1 waits in operation 0 (receive, layer 5, "
              "micro-batch 2, group pp) of received f32 [4] for rank 0; rank 2 waits in operation "
              "0 (all_reduce, layer 5, micro-batch 2, group world) of metric f64 [1] for rank 1.");
}

TEST(CollectiveScheduleCheck, RefusesAFinishedSendThatWaitsForItself) {
  std::vector<ScheduledRank> ranks(2);
  ranks[0].send(1).finish(1, 0).receive(1);
  ranks[1].send(0).finish(0, 0).receive(0);
  expect_says(refusal(ranks, pipeline_of(2)),
              "rank 0 waits in operation 2 (finish_send, group pp) of stream f32 [4] for rank 1; "
              "rank 1 waits in operation 2 (finish_send, group pp) of stream f32 [4] for rank 0.");
}

TEST(CollectiveScheduleCheck, RefusesMessagesThatDiffer) {
  std::vector<ScheduledRank> ranks(2);
  ranks[0].send(1, 4).send(1, 6).finish(1, 0).finish(1, 1);
  ranks[1].receive(0, 6).receive(0, 4);
  expect_says(refusal(ranks, pipeline_of(2)),
              "message 0 from rank 0 is sent in operation 1 (send, group pp) of stream f32 [4] and "
              "received by rank 1 in operation 0 (receive, group pp) of received f32 [6].");
}

TEST(CollectiveScheduleCheck, RefusesLostMessages) {
  std::vector<ScheduledRank> unread(2);
  unread[0].send(1).finish(1, 0);
  expect_says(refusal(unread, pipeline_of(2)), "rank 1 never receives message 0 from rank 0");
  std::vector<ScheduledRank> unwritten(2);
  unwritten[1].receive(0);
  expect_says(refusal(unwritten, pipeline_of(2)), "rank 0 never sends message 0 to rank 1");
  std::vector<ScheduledRank> unfinished(2);
  unfinished[0].send(1);
  unfinished[1].receive(0);
  expect_says(refusal(unfinished, pipeline_of(2)), "rank 0 never finishes its send to rank 1");
  std::vector<ScheduledRank> swapped(2);
  swapped[0].send(1).send(1).finish(1, 1).finish(1, 0);
  swapped[1].receive(0).receive(0);
  expect_says(refusal(swapped, pipeline_of(2)),
              "rank 0 finishes a send to rank 1 that is not the next one, in operation 4");
}

TEST(CollectiveScheduleCheck, RefusesForeignGroups) {
  std::vector<ScheduledRank> ranks(2);
  ranks[0].sum(RankGroup::embedding);
  const Layout layout({.world_size = 2, .pipeline_parallel = 2, .embedding_places = {1}});
  expect_says(refusal(ranks, layout), "rank 0 has no such group for operation 0");
  std::vector<ScheduledRank> alone(2);
  alone[0].send(0);
  expect_says(refusal(alone, pipeline_of(2)), "rank 0 has no peer 0 for operation 1 (send");
}

// A message of many ranks stays short.
TEST(CollectiveScheduleCheck, NamesSomeOfManyWaitingRanks) {
  std::vector<ScheduledRank> ranks(64);
  ranks[0].sum(RankGroup::tp).sum(RankGroup::world);
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    ranks[rank].sum(RankGroup::world).sum(RankGroup::tp);
  }
  const std::string message = refusal(ranks, Layout({.world_size = 64, .tensor_parallel = 2}));
  expect_says(message, "; and 48 more");
  EXPECT_LT(message.size(), 4000U);
}

TEST(CollectiveScheduleCheck, CountsTheMissingRanksThatItDoesNotName) {
  // All others wait, one for the other, for a message that the first sends later.
  const auto message_of_ranks = [](int32_t count) {
    std::vector<ScheduledRank> ranks(static_cast<size_t>(count));
    ranks[0].sum(RankGroup::world).send(1).finish(1, 0);
    for (int32_t rank = 1; rank < count; ++rank) {
      ScheduledRank& each = ranks[static_cast<size_t>(rank)];
      each.receive(rank - 1);
      if (rank + 1 < count) each.send(rank + 1).finish(rank + 1, 0);
      each.sum(RankGroup::world);
    }
    return refusal(ranks, pipeline_of(count));
  };
  expect_says(message_of_ranks(17), "for rank 1, rank 2, ");
  expect_says(message_of_ranks(17), ", rank 15, rank 16; rank 1 waits");
  expect_says(message_of_ranks(20), ", rank 15, rank 16 and 3 more; rank 1 waits");
}

TEST(CollectiveScheduleCheck, HashTellsMessagesApart) {
  ScheduledRank a;
  ScheduledRank b;
  ScheduledRank c;
  ScheduledRank d;
  a.send(1).finish(1, 0);
  b.send(1).finish(1, 0);
  c.send(2).finish(2, 0);
  d.send(1, 5).finish(1, 0);
  EXPECT_EQ(hash_collectives(a.program), hash_collectives(b.program));
  EXPECT_NE(hash_collectives(a.program), hash_collectives(c.program));
  EXPECT_NE(hash_collectives(a.program), hash_collectives(d.program));
}

}  // namespace
}  // namespace troupe
