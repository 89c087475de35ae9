// Copies of hot experts change nothing but the order of sums: layouts of all kinds compute what one
// rank does, and whatever else a step does beside leaves every bit. And they do what they are for:
// rooms that are far too small for a crowded rank suffice.
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <vector>

#include "passes/memory_plan.h"
#include "support/expert_cases.h"
#include "support/layout_models.h"
#include "support/layout_run.h"
#include "support/random_layouts.h"

namespace troupe::testing {
namespace {

constexpr TokenDispatcher kEveryDispatcher[] = {TokenDispatcher::allgather,
                                                TokenDispatcher::alltoall, TokenDispatcher::flex,
                                                TokenDispatcher::hierarchical};

// Rooms: for all that may come, for less than most steps need with copies, and for most.
constexpr double kRoomsOfClones[] = {0, 1.05, 1.5};

std::vector<LayoutCase> layouts_with_clones() {
  std::vector<LayoutCase> all;
  for (LayoutCase& c : random_layouts(36)) {
    if (c.model.num_experts == 0 || Layout(run_layout_of(c)->layout.options()).ep() == 1) continue;
    c.expert_clones = 1 + static_cast<int32_t>(all.size() % 3);
    c.expert_room = kRoomsOfClones[all.size() / 3 % std::size(kRoomsOfClones)];
    all.push_back(c);
  }
  return all;
}

class ExpertClones : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(ExpertClones, ComputesWhatOneRankDoes) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(RandomLayouts, ExpertClones, ::testing::ValuesIn(layouts_with_clones()),
                         [](const auto& test) { return test.param.name; });

// Experts with biases, of which all tokens of the first `crowded` layers choose two of one rank:
// four times the mean.
LayoutCase crowded_ranks(TokenDispatcher dispatcher, int32_t crowded) {
  LayoutCase c = experts_of_four(moe_model(3), dispatcher);
  c.model.add_bias_linear = true;
  c.expert_clones = 1;
  for (int32_t layer = 0; layer < crowded; ++layer) c.crowded_layers.push_back(layer);
  return c;
}

TEST(ExpertClonesOfFour, NeedNoMoreRoomThanThirteenTenths) {
  for (const TokenDispatcher dispatcher : kEveryDispatcher) {
    SCOPED_TRACE(name_of(dispatcher));
    LayoutCase c = crowded_ranks(dispatcher, 3);
    const Outcome one = run_one_rank(c);
    int64_t fallbacks = -1;
    c.fallbacks = &fallbacks;
    c.expert_room = 1.3;
    const Outcome copied = run_layout(c);
    EXPECT_EQ(fallbacks, 0);
    expect_same_outcome(one, copied);
    expect_same_bits(copied, run_layout(c, {.oracle = true}));
    c.expert_room = 0;
    expect_same_bits(copied, run_layout(c));
    c.expert_clones = 0;
    c.expert_room = 3.9;
    expect_same_outcome(one, run_layout(c));
    EXPECT_EQ(fallbacks, 3);
  }
}

TEST(ExpertClonesOfFour, GoWithRecomputeOffloadOverlapAndStash) {
  for (const TokenDispatcher dispatcher :
       {TokenDispatcher::alltoall, TokenDispatcher::hierarchical}) {
    SCOPED_TRACE(name_of(dispatcher));
    LayoutCase c = crowded_ranks(dispatcher, 2);
    const Outcome kept = run_layout(c);
    expect_same_bits(kept, run_layout(c, {.interleaving = 5}));
    expect_same_with_recompute_offload_and_overlap(kept, c);
    c.overlap = {.delay_weight_gradients = true};
    c.merged = true;
    c.stash = {.factor = 8, .page_bytes = 256};
    expect_same_bits(kept, run_layout(c));
    c.stash = {};
    c.skipped_passes = {PassId::recompute};  // the copies are kept
    expect_same_bits(kept, run_layout(c));
  }
}

// Stages, slices of experts, and state that ranks share.
TEST(ExpertClonesOfFour, GoWithPipelinesSlicesAndShards) {
  LayoutCase c = crowded_ranks(TokenDispatcher::flex, 2);
  c.model.num_layers = 4;
  c.model.moe_layers.assign(4, true);
  c.layout.world_size = 8;
  c.layout.pipeline_parallel = 2;
  const Outcome one = run_one_rank(c);
  for (const PipelineSchedule schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::zb_h1}) {
    c.schedule = schedule;
    expect_same_outcome(one, run_layout(c));
  }

  LayoutCase sharded = crowded_ranks(TokenDispatcher::alltoall, 2);
  sharded.layout.world_size = 8;  // two replicas of the experts
  const Outcome of_one = run_one_rank(sharded);
  for (const StateSharding sharding : {StateSharding::optimizer, StateSharding::parameters}) {
    sharded.sharding = sharding;
    sharded.early_collectives = true;
    expect_same_outcome(of_one, run_layout(sharded));
  }

  LayoutCase sliced = crowded_ranks(TokenDispatcher::allgather, 0);
  sliced.model.add_bias_linear = false;
  sliced.layout.world_size = 4;
  sliced.layout.tensor_parallel = 2;
  sliced.layout.sequence_parallel = true;
  sliced.layout.expert_parallel = 2;
  sliced.layout.expert_tensor_parallel = 2;
  sliced.expert_clones = 2;
  const Outcome whole = run_one_rank(sliced);
  for (const TokenDispatcher dispatcher : kEveryDispatcher) {
    SCOPED_TRACE(name_of(dispatcher));
    sliced.dispatcher = dispatcher;
    sliced.layout.dispatch_node_ranks = dispatcher == TokenDispatcher::hierarchical ? 2 : 0;
    expect_same_outcome(whole, run_layout(sliced));
  }
}

// Copies of weights and their gradients live in one layer's forward or backward: more layers take
// no more of them.
TEST(ExpertClonesOfFour, AreNotKeptForTheBackwardPass) {
  const auto bytes = [](int32_t layers, int32_t clones) {
    LayoutCase c = crowded_ranks(TokenDispatcher::alltoall, 0);
    c.model = moe_model(layers);
    c.model.num_experts = 8;
    c.expert_clones = clones;
    c.micro_batches = 1;
    return static_cast<int64_t>(plan_memory(*program_of(c, 1), 1).transient_bytes);
  };
  const int64_t weights_of_layer = moe_model(1).hidden_size * moe_model(1).moe_ffn_hidden_size * 2 *
                                   3 * 8;  // of two experts of three products in f64
  const int64_t of_two = bytes(2, 1) - bytes(2, 0);
  const int64_t of_eight = bytes(8, 1) - bytes(8, 0);
  EXPECT_GT(of_two, 0);
  EXPECT_LT(of_eight - of_two, weights_of_layer);
}

}  // namespace
}  // namespace troupe::testing
