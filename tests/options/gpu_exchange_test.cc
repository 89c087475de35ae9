// Which groups of ranks have GPUs that do not reach each other's memory: --gpu-exchange, and where
// the ranks are.
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/thread_group.h"
#include "model/model_part.h"
#include "options/layout_options.h"

namespace troupe {
namespace {

using Staged = std::array<bool, kRankGroupCount>;

bool is_staged(const Staged& staged, RankGroup kind) {
  return staged[static_cast<size_t>(kind)];
}

// TP 2, EP 2: neighbours are a tp group, which is an ep group, too.
Layout layout_of_four() {
  return Layout({.world_size = 4,
                 .tensor_parallel = 2,
                 .expert_parallel = 2,
                 .expert_tensor_parallel = 1,
                 .sequence_parallel = true});
}

std::string refusal(GpuExchange exchange, const std::vector<int32_t>& machines,
                    int32_t ranks_per_gpu) {
  try {
    staged_groups_of(layout_of_four(), exchange, machines, ranks_per_gpu);
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::bad_request);
    return error.what();
  }
  return "";
}

TEST(GpuExchange, OnOneMachineNothingIsStagedUnlessAsked) {
  for (const GpuExchange exchange : {GpuExchange::automatic, GpuExchange::peer}) {
    EXPECT_EQ(staged_groups_of(layout_of_four(), exchange, {0, 0, 0, 0}, 4), Staged{})
        << static_cast<int>(exchange);
  }
  const Staged staged = staged_groups_of(layout_of_four(), GpuExchange::nccl, {0, 0, 0, 0}, 1);
  for (const RankGroup kind : {RankGroup::world, RankGroup::tp, RankGroup::ep, RankGroup::dp}) {
    EXPECT_TRUE(is_staged(staged, kind)) << name_of(kind);
  }
  EXPECT_FALSE(is_staged(staged, RankGroup::pp)) << "of one rank";
}

TEST(GpuExchange, GroupsThatSpanMachinesAre) {
  const Staged staged = staged_groups_of(layout_of_four(), GpuExchange::automatic, {0, 0, 2, 2}, 1);
  EXPECT_FALSE(is_staged(staged, RankGroup::tp));
  EXPECT_FALSE(is_staged(staged, RankGroup::ep));
  EXPECT_TRUE(is_staged(staged, RankGroup::dp));
  EXPECT_TRUE(is_staged(staged, RankGroup::world));
  // One of the tp groups does: all are treated alike.
  EXPECT_TRUE(is_staged(staged_groups_of(layout_of_four(), GpuExchange::automatic, {0, 0, 0, 3}, 1),
                        RankGroup::tp));
}

TEST(GpuExchange, WhatCannotBeIsRefused) {
  EXPECT_NE(refusal(GpuExchange::peer, {0, 0, 2, 2}, 1)
                .find("--gpu-exchange peer: the ranks lie on several"),
            std::string::npos);
  EXPECT_NE(refusal(GpuExchange::nccl, {0, 0, 0, 0}, 2).find("--ranks-per-gpu 2: NCCL"),
            std::string::npos);
  EXPECT_NE(
      refusal(GpuExchange::automatic, {0, 0, 2, 2}, 2).find("GPUs of several machines exchange"),
      std::string::npos);
}

TEST(GpuExchange, ARankKnowsTheSizesOfItsGroups) {
  RunLayout run = layout_of_one_rank(2);
  run.layout = layout_of_four();
  run.is_staged = staged_groups_of(run.layout, GpuExchange::automatic, {0, 0, 2, 2}, 1);
  const ModelPart part{.run = std::make_shared<const RunLayout>(run), .rank = 1};
  const StagedGroups staged = part.staged_groups();
  EXPECT_EQ(staged[static_cast<size_t>(RankGroup::world)], 4);
  EXPECT_EQ(staged[static_cast<size_t>(RankGroup::dp)], 2);
  EXPECT_EQ(staged[static_cast<size_t>(RankGroup::tp)], 0);
}

TEST(GpuExchange, ThreadsAreOnOneMachine) {
  const ThreadGroup group(3);
  EXPECT_EQ(group.machine_of_rank(), (std::vector<int32_t>{0, 0, 0}));
  EXPECT_EQ(group.ranks_of_machine(), (std::vector<int32_t>{0, 1, 2}));
}

}  // namespace
}  // namespace troupe
