// Experts with limited room compute what one rank computes: where the room suffices, and where it
// does not and the step runs again in rounds of tokens. Whether it suffices changes nothing that a
// run leaves behind but the order of sums; and the same run leaves the same bits.
#include <gtest/gtest.h>
#include <numeric>
#include <string>
#include <vector>

#include "model/blocks/moe.h"
#include "passes/memory_plan.h"
#include "support/expert_cases.h"
#include "support/layout_models.h"
#include "support/layout_run.h"
#include "support/random_layouts.h"

namespace troupe::testing {
namespace {

// Rooms of which the first are too small for nearly every step, and the last for few.
constexpr double kRooms[] = {0.01, 0.5, 0.9, 1.0, 1.15, 1.4};
// And stashes: none, such as lack pages in nearly every step, or in some, and such as suffice.
constexpr double kStashes[] = {0, 0.4, 1.0, 1.2, 8};

std::vector<LayoutCase> layouts_with_rooms() {
  std::vector<LayoutCase> all;
  for (LayoutCase& c : random_layouts(160)) {
    if (c.model.num_experts == 0) continue;
    const Layout layout(run_layout_of(c)->layout.options());
    if (layout.ep() * layout.etp() == 1) continue;
    c.expert_room = kRooms[all.size() % std::size(kRooms)];
    c.stash = {.factor = kStashes[all.size() % std::size(kStashes)], .page_bytes = 256};
    all.push_back(c);
  }
  return all;
}

class ExpertRoom : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(ExpertRoom, ComputesWhatOneRankDoes) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(RandomLayouts, ExpertRoom, ::testing::ValuesIn(layouts_with_rooms()),
                         [](const auto& test) { return test.param.name; });

LayoutCase four_ranks(TokenDispatcher dispatcher, double room) {
  LayoutCase c = experts_of_four(auxiliary_loss_models(moe_model(3))[2].config, dispatcher);
  c.expert_room = room;
  return c;
}

TEST(ExpertRoomOfFour, FallsBackWhereItMustAndOnlyThere) {
  for (const TokenDispatcher dispatcher : {TokenDispatcher::allgather, TokenDispatcher::alltoall,
                                           TokenDispatcher::flex, TokenDispatcher::hierarchical}) {
    SCOPED_TRACE(name_of(dispatcher));
    const Outcome whole = run_layout(four_ranks(dispatcher, 0));
    int64_t fallbacks = -1;
    LayoutCase c = four_ranks(dispatcher, 4);
    c.fallbacks = &fallbacks;
    expect_same_bits(whole, run_layout(c));
    EXPECT_EQ(fallbacks, 0);
    c.expert_room = 0.5;  // the fullest rank has at least an even load
    const Outcome in_rounds = run_layout(c);
    EXPECT_EQ(fallbacks, 3);
    expect_same_outcome(whole, in_rounds);
    expect_same_bits(in_rounds, run_layout(c));
    expect_same_bits(in_rounds, run_layout(c, {.oracle = true}));
  }
}

TEST(ExpertRoomOfFour, GoesWithRecomputeOffloadAndOverlap) {
  for (const TokenDispatcher dispatcher :
       {TokenDispatcher::alltoall, TokenDispatcher::hierarchical}) {
    SCOPED_TRACE(name_of(dispatcher));
    LayoutCase c = four_ranks(dispatcher, 0.75);
    int64_t fallbacks = 0;
    c.fallbacks = &fallbacks;
    const Outcome kept = run_layout(c);
    EXPECT_EQ(fallbacks, 3);
    expect_same_with_recompute_offload_and_overlap(kept, c);
  }
}

// Layers that send all tokens to experts of one of the four ranks, first, last, and each to another
// one, in one stage and in two.
std::vector<std::vector<int32_t>> crowds(int32_t layers) {
  std::vector<int32_t> all(static_cast<size_t>(layers));
  std::iota(all.begin(), all.end(), 0);
  return {{0}, {layers - 1}, {layers / 2}, all};
}

LayoutCase with_router_biases(int32_t layers, int32_t stages) {
  LayoutCase c = four_ranks(TokenDispatcher::alltoall, 3);
  c.model = moe_model(layers);
  c.model.add_bias_linear = true;
  c.model.num_experts = 8;
  c.layout.world_size = 4 * stages;
  c.layout.pipeline_parallel = stages;
  return c;
}

TEST(ExpertRoomOfFour, FallsBackWhereverALayerLacksRoom) {
  for (const int32_t stages : {1, 2}) {
    LayoutCase c = with_router_biases(4, stages);
    int64_t fallbacks = -1;
    c.fallbacks = &fallbacks;
    run_layout(c);
    EXPECT_EQ(fallbacks, 0);
    for (const std::vector<int32_t>& layers : crowds(4)) {
      SCOPED_TRACE(layers.size() == 1 ? std::to_string(layers[0]) : "all");
      c.crowded_layers = layers;
      const Outcome one = run_one_rank(c);
      const Outcome kept = run_layout(c);
      EXPECT_EQ(fallbacks, 3);
      expect_same_outcome(one, kept);
      LayoutCase other = c;
      other.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                         .modules = {&kExpertActivationModule}};
      expect_same_bits(kept, run_layout(other));
      other.recompute = {};
      other.offload = {.modules = {&kExpertFc1Module}, .fraction = 1};
      other.overlap = {.delay_weight_gradients = true};
      other.merged = stages == 1;
      other.stash = {.factor = 8, .page_bytes = 256};
      expect_same_bits(kept, run_layout(other));
      EXPECT_EQ(fallbacks, 3);
    }
  }
}

// Of a stash the sum over the layers counts that are stashed: one crowded layer is too much, if it
// is not the one with which the backward pass begins.
TEST(ExpertRoomOfFour, FallsBackWhereLayersTogetherLackPages) {
  for (const int32_t stages : {1, 2}) {
    LayoutCase c = with_router_biases(6, stages);
    c.expert_room = 0;
    c.sequence = 48;
    // One of five layers with four times an even load is 1.6 times all their rows; a stage of three
    // keeps five at a time, of two micro-batches.
    c.stash = {.factor = stages == 1 ? 1.5 : 1.9, .page_bytes = 256};
    int64_t fallbacks = -1;
    c.fallbacks = &fallbacks;
    run_layout(c);
    EXPECT_EQ(fallbacks, 0);
    for (const std::vector<int32_t>& layers : crowds(6)) {
      SCOPED_TRACE(layers.size() == 1 ? std::to_string(layers[0]) : "all");
      c.crowded_layers = layers;
      const Outcome kept = run_layout(c);
      const bool is_stashed = layers.size() > 1 || layers[0] != 5;
      EXPECT_EQ(fallbacks, is_stashed ? 3 : 0);
      expect_same_outcome(run_one_rank(c), kept);
    }
  }
}

// Whether what is kept is packed, and in which pages, changes no bit where it fits.
TEST(ExpertRoomOfFour, StashesWhatIsKeptAndFallsBackWherePagesLack) {
  for (const TokenDispatcher dispatcher : {TokenDispatcher::allgather, TokenDispatcher::alltoall,
                                           TokenDispatcher::flex, TokenDispatcher::hierarchical}) {
    SCOPED_TRACE(name_of(dispatcher));
    int64_t fallbacks = -1;
    LayoutCase c = four_ranks(dispatcher, 0);
    const Outcome whole = run_layout(c);
    c.fallbacks = &fallbacks;
    for (const double room : {0.0, 4.0}) {
      c.expert_room = room;
      c.stash = {.factor = 8, .page_bytes = 256};
      expect_same_bits(whole, run_layout(c));
      EXPECT_EQ(fallbacks, 0);
      expect_same_bits(whole, run_layout(c, {.oracle = true}));
      c.stash.page_bytes = 4096;
      expect_same_bits(whole, run_layout(c));
      EXPECT_EQ(fallbacks, 0);
      c.stash = {.factor = 0.25, .page_bytes = 256};
      const Outcome in_rounds = run_layout(c);
      EXPECT_EQ(fallbacks, 3);
      expect_same_outcome(whole, in_rounds);
      expect_same_bits(in_rounds, run_layout(c));
    }
  }
}

TEST(ExpertRoomOfFour, StashesBesideRecomputeOffloadAndOverlap) {
  const auto stashed = [](LayoutCase c, const Outcome& expected) {
    int64_t fallbacks = -1;
    c.fallbacks = &fallbacks;
    c.stash = {.factor = 8, .page_bytes = 256};
    expect_same_bits(expected, run_layout(c));
    EXPECT_EQ(fallbacks, 0);
  };
  LayoutCase c = four_ranks(TokenDispatcher::alltoall, 0);
  const Outcome kept = run_layout(c);
  c.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                 .modules = {&kExpertActivationModule}};
  stashed(c, kept);
  c.recompute = {};
  c.offload = {.modules = {&kExpertFc1Module}, .fraction = 0.5};
  stashed(c, kept);
  c.offload = {};
  c.overlap = {.delay_weight_gradients = true};
  c.merged = true;
  stashed(c, kept);
}

// Bytes of the transient memory of a rank's step, with room for its fallback.
TEST(ExpertRoomOfFour, NeedsLessMemoryTheLessRoomThereIs) {
  const auto bytes = [](double room) {
    LayoutCase c = four_ranks(TokenDispatcher::alltoall, room);
    c.sequence = 96;
    return plan_memory(*program_of(c, 1), 1).transient_bytes;
  };
  EXPECT_LT(bytes(1.5), bytes(2));
  EXPECT_LT(bytes(2), bytes(0));
  EXPECT_EQ(bytes(100), bytes(0));
}

// Rooms of eight times an even load, which layers work in one after the other, while what all of
// them keep has 1.5 times: less than with rooms of four times without a stash.
TEST(ExpertRoomOfFour, NeedsLessMemoryWithAStash) {
  const auto bytes = [](double room, double factor) {
    LayoutCase c = four_ranks(TokenDispatcher::alltoall, room);
    c.model = auxiliary_loss_models(moe_model(8))[2].config;
    c.model.num_experts = 8;
    c.sequence = 96;
    c.stash = {.factor = factor, .page_bytes = 256};
    return plan_memory(*program_of(c, 1), 1).transient_bytes;
  };
  EXPECT_LT(bytes(4, 1.5), bytes(2, 0));
  EXPECT_LT(bytes(4, 1), bytes(4, 1.5));
}

}  // namespace
}  // namespace troupe::testing
