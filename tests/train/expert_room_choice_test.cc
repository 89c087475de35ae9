// How much room experts get: the largest that fits, and the least that a load needs.
#include "train/expert_room_choice.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <optional>
#include <vector>

#include "options/cluster_options.h"
#include "options/model_options.h"
#include "options/options.h"

namespace troupe {
namespace {

// Plans alone: nothing runs, so no GPU is needed.
class ExpertRoomChoice : public ::testing::Test {
 protected:
  ExpertRoomChoice() {
    options_.command = Command::plan;
    options_.model = "quickstart";
    options_.ranks = 8;
    options_.expert_model_parallel_size = 8;
    options_.device = Device::cuda;
    options_.eval_iters = 0;
    config_ = load_model_config(options_);
  }
  uint64_t bytes(double room) const { return step_bytes_with_room(options_, config_, 0, room); }
  double chosen(uint64_t usable) const { return choose_expert_room(options_, config_, usable); }

  Options options_;
  ModelConfig config_;
};

TEST_F(ExpertRoomChoice, MoreRoomTakesMoreBytes) {
  EXPECT_LT(bytes(1.25), bytes(2));
  EXPECT_LT(bytes(2), bytes(3));
  EXPECT_LT(bytes(3), bytes(0));
}

TEST_F(ExpertRoomChoice, IsTheLargestThatFits) {
  EXPECT_EQ(chosen(bytes(0)), 0);
  EXPECT_EQ(chosen(bytes(3)), 3);
  EXPECT_EQ(chosen(bytes(3) - 1), 2.5);
  EXPECT_EQ(chosen(bytes(1.25)), 1.25);
}

TEST_F(ExpertRoomChoice, IsTheLeastWhereNothingFits) {
  EXPECT_EQ(chosen(1), 1.25);
}

TEST_F(ExpertRoomChoice, CountsEvaluationBesideTheStep) {
  const uint64_t usable = bytes(3);
  options_.eval_iters = 1;
  EXPECT_LT(chosen(usable), 3);
}

TEST_F(ExpertRoomChoice, EvaluationTakesLessWithLessRoom) {
  const auto evaluation_bytes = [&](double room) {
    const uint64_t step = bytes(room);
    uint64_t lacks = step;
    uint64_t fits = 2 * step;
    while (fits - lacks > step / 4096) {
      const uint64_t middle = lacks + (fits - lacks) / 2;
      const double chosen_room = chosen(middle);
      (chosen_room == 0 || chosen_room >= room ? fits : lacks) = middle;  // 0: room for all
    }
    return fits - step;
  };
  options_.eval_iters = 1;
  EXPECT_LT(1.05 * static_cast<double>(evaluation_bytes(1.5)),
            static_cast<double>(evaluation_bytes(3)));
}

TEST_F(ExpertRoomChoice, RanksShareTheGpu) {
  options_.ranks_per_gpu = 2;
  EXPECT_EQ(chosen(2 * bytes(3)), 3);
  EXPECT_EQ(chosen(2 * bytes(3) - 2), 2.5);
}

TEST_F(ExpertRoomChoice, ConcernsSharedExpertsAlone) {
  options_.expert_model_parallel_size = 1;
  EXPECT_EQ(chosen(1), 0);
}

TEST_F(ExpertRoomChoice, IsMadeWhereOptionsLeaveItOpen) {
  EXPECT_EQ(with_expert_room(options_, config_, bytes(2)).moe_expert_rank_capacity_factor, 2);
  EXPECT_FALSE(with_expert_room(options_, config_, bytes(0)).moe_expert_rank_capacity_factor);
  EXPECT_FALSE(with_expert_room(options_, config_, 0).moe_expert_rank_capacity_factor);
  Options asked = options_;
  asked.moe_expert_rank_capacity_factor = 0;
  EXPECT_EQ(with_expert_room(asked, config_, bytes(2)).moe_expert_rank_capacity_factor, 0);
  set_option(asked, *find_option("moe-expert-rank-capacity-factor"), "auto");
  EXPECT_FALSE(asked.moe_expert_rank_capacity_factor);
}

// Once the room is known, which comes first, the largest factor that fits beside it.
TEST_F(ExpertRoomChoice, GivesTheStashWhatIsLeft) {
  const auto with_stash = [&](double factor) {
    Options options = options_;
    options.moe_paged_stash = true;
    options.moe_paged_stash_buffer_size_factor_cuda = factor;
    return options;
  };
  const auto bytes_with = [&](double factor) {
    return step_bytes_with_room(with_stash(factor), config_, 0, 0);
  };
  Options open = with_stash(1);
  open.moe_paged_stash_buffer_size_factor_cuda.reset();
  const auto chosen_stash = [&](uint64_t usable) {
    const Options chosen = with_expert_room(open, config_, usable);
    EXPECT_FALSE(chosen.moe_expert_rank_capacity_factor.has_value());
    return chosen.moe_paged_stash_buffer_size_factor_cuda;
  };
  EXPECT_LT(bytes_with(2), bytes_with(4));
  EXPECT_EQ(chosen_stash(bytes_with(4)), 4);
  EXPECT_EQ(chosen_stash(bytes_with(2)), 2);
  EXPECT_EQ(chosen_stash(bytes_with(2) - 1), 1.75);
  EXPECT_EQ(chosen_stash(bytes_with(1.1)), std::nullopt);
  open.moe_expert_rank_capacity_factor = 2;
  EXPECT_EQ(with_expert_room(open, config_, bytes_with(4)).moe_paged_stash_buffer_size_factor_cuda,
            4);
  open.moe_paged_stash_buffer_size_factor_cuda = 1.2;
  EXPECT_EQ(with_expert_room(open, config_, bytes_with(4)).moe_paged_stash_buffer_size_factor_cuda,
            1.2);
  open = options_;  // without a stash
  EXPECT_EQ(with_expert_room(open, config_, bytes_with(4)).moe_paged_stash_buffer_size_factor_cuda,
            std::nullopt);
}

TEST_F(ExpertRoomChoice, ByALoadLeavesWhatWasAsked) {
  const auto room = [&](const Options& options) {
    return with_least_expert_room(options, config_, ExpertLoad()).moe_expert_rank_capacity_factor;
  };
  EXPECT_EQ(room(options_), 1.25) << "of an even load";
  for (const double asked : {0.0, 3.0}) {
    Options options = options_;
    options.moe_expert_rank_capacity_factor = asked;
    EXPECT_EQ(room(options), asked);
  }
}

// The least of the rooms that a choice gives that is no less than the load; none where that is as
// much as all ranks together have.
TEST_F(ExpertRoomChoice, ByALoadIsTheLeastThatSuffices) {
  // Rows for each expert of the first of 8 ranks, and of the others.
  const auto room = [&](double first, double others) {
    ExpertLoad::LayerRows layer{
        .layer = 0, .rows = std::vector<double>(static_cast<size_t>(config_.num_experts), others)};
    std::fill_n(layer.rows.begin(), config_.num_experts / 8, first);
    const std::vector<std::vector<ExpertLoad::LayerRows>> steps = {{layer}};
    return with_least_expert_room(options_, config_, ExpertLoad::measured(steps))
        .moe_expert_rank_capacity_factor;
  };
  EXPECT_EQ(room(35, 27), 1.25) << "35 of 28 on average";
  EXPECT_EQ(room(36, 27), 1.5);
  EXPECT_EQ(room(21, 13), 1.5) << "21 of 14";
  EXPECT_EQ(room(42, 2), 6) << "42 of 7";
  EXPECT_EQ(room(43, 2), std::nullopt) << "8 would be room for all";
  EXPECT_EQ(room(1, 0), std::nullopt);
}

TEST_F(ExpertRoomChoice, ByALoadIsOfExpertsThatRanksShare) {
  const auto room = [&] {
    return with_least_expert_room(options_, config_, ExpertLoad()).moe_expert_rank_capacity_factor;
  };
  options_.expert_model_parallel_size = 1;
  EXPECT_EQ(room(), std::nullopt) << "of one rank";
  options_.expert_model_parallel_size = config_.num_experts + 1;
  EXPECT_EQ(room(), std::nullopt) << "refused elsewhere";
  options_.expert_model_parallel_size = 8;
  config_.num_experts = 0;
  EXPECT_EQ(room(), std::nullopt);
}

TEST_F(ExpertRoomChoice, GoesByTheGpusThatAreNamed) {
  options_.gpus = "8xh100";
  const uint64_t of_h100 = usable_bytes_of_gpu(options_);
  options_.gpus = "8xh200";
  EXPECT_LT(of_h100, usable_bytes_of_gpu(options_));
  EXPECT_EQ(of_h100 >> 30, 76U);
  const uint64_t whole = gpu_cluster_of(options_)->model.memory_bytes;
  EXPECT_EQ(usable_bytes_of_gpu(options_), whole - whole / 32);
  options_.device = Device::cpu;
  EXPECT_EQ(usable_bytes_of_gpu(options_), 0U);
}

}  // namespace
}  // namespace troupe
