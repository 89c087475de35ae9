// How much room experts get: the largest that fits, and the least that a load needs.
#include "train/expert_room_choice.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <optional>
#include <utility>
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
    options_.moe_paged_stash = false;
    config_ = load_model_config(options_);
  }
  uint64_t bytes(double room) const { return step_bytes_with_room(options_, config_, 0, room); }
  // 0: the most that may come.
  double chosen(uint64_t usable) const {
    return with_expert_room(options_, config_, usable).moe_expert_rank_capacity_factor.value_or(0);
  }

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

// The step of a rank with a stash.
class StashChoice : public ExpertRoomChoice {
 protected:
  StashChoice() { options_.moe_paged_stash.reset(); }
  static Options with_stash(Options options, double factor) {
    options.moe_paged_stash = true;
    options.moe_paged_stash_buffer_size_factor_cuda = factor;
    return options;
  }
  uint64_t bytes_with(double room, double factor) const {
    return step_bytes_with_room(with_stash(options_, factor), config_, 0, room);
  }
  // Room and factor; of no stash 0.
  using Chosen = std::pair<std::optional<double>, double>;
  Chosen chosen_of(const Options& options, uint64_t usable) const {
    const Options chosen = with_expert_room(options, config_, usable);
    const double factor = chosen.moe_paged_stash_buffer_size_factor_cuda.value_or(0);
    EXPECT_EQ(chosen.moe_paged_stash.value_or(false), factor > 0);
    return {chosen.moe_expert_rank_capacity_factor, factor};
  }
};

TEST_F(StashChoice, IsTheLargestThatFitsBesideTheRoom) {
  Options open = options_;
  open.moe_paged_stash = true;
  EXPECT_LT(bytes_with(0, 2), bytes_with(0, 4));
  EXPECT_EQ(chosen_of(open, bytes_with(0, 4)), Chosen(std::nullopt, 4));
  EXPECT_EQ(chosen_of(open, bytes_with(0, 2)), Chosen(std::nullopt, 2));
  EXPECT_EQ(chosen_of(open, bytes_with(0, 2) - 1), Chosen(4, 1.75));
  EXPECT_EQ(chosen_of(open, bytes_with(1.5, 1.25)), Chosen(1.5, 1.25));
  EXPECT_EQ(chosen_of(open, 1), Chosen(1.25, 1.1)) << "where nothing fits";
}

TEST_F(StashChoice, LeavesWhatWasAsked) {
  Options asked = options_;
  asked.moe_paged_stash = true;
  asked.moe_expert_rank_capacity_factor = 2;
  EXPECT_EQ(chosen_of(asked, bytes_with(2, 4)), Chosen(2, 4));
  EXPECT_EQ(chosen_of(asked, bytes_with(2, 1.75)), Chosen(2, 1.75));
  asked.moe_paged_stash_buffer_size_factor_cuda = 1.2;
  EXPECT_EQ(chosen_of(asked, bytes_with(2, 4)), Chosen(2, 1.2));
  asked.moe_expert_rank_capacity_factor.reset();
  EXPECT_EQ(chosen_of(asked, bytes_with(3, 1.2)), Chosen(3, 1.2));
  asked = options_;
  asked.moe_expert_rank_capacity_factor = 1.25;
  EXPECT_EQ(chosen_of(asked, bytes_with(4, 2)), Chosen(1.25, 0)) << "room alone";
}

// The stash takes fewer bytes for the same room, and is taken where that gives enough of it.
TEST_F(StashChoice, IsTakenWhereRoomLacksWithoutIt) {
  const uint64_t enough = bytes(kEnoughRoom);
  EXPECT_EQ(chosen_of(options_, enough), Chosen(kEnoughRoom, 0));
  ASSERT_LE(bytes_with(2, 1.25), enough - 1);
  EXPECT_EQ(chosen_of(options_, enough - 1), Chosen(2, 1.25));
  // Too few bytes for any room without it.
  ASSERT_LT(bytes_with(1.25, 1.1), bytes(1.25));
  EXPECT_EQ(chosen_of(options_, bytes_with(1.25, 1.1)), Chosen(1.25, 1.1));
  EXPECT_EQ(chosen_of(options_, bytes_with(1.25, 1.1) - 1), Chosen(1.25, 0)) << "nothing fits";
  Options without = options_;
  without.moe_paged_stash = false;
  EXPECT_EQ(chosen_of(without, enough - 1), Chosen(1.25, 0)) << "as was asked";
  EXPECT_EQ(chosen_of(options_, 0), Chosen(std::nullopt, 0)) << "on a CPU";
}

TEST_F(StashChoice, IsSaidWithItsPrice) {
  const auto note = [&](uint64_t usable) {
    return note_on_stash(options_, with_expert_room(options_, config_, usable));
  };
  EXPECT_EQ(note(bytes(kEnoughRoom)), "");
  EXPECT_EQ(note(bytes(kEnoughRoom) - 1),
            "Note: --moe-paged-stash is on, as the GPU has no room for 1.5 times an even load of "
            "experts without it. With it a layer has room for 2 times, and the whole step for 1.25 "
            "times. In measured steps its copies took 3.6 to 5.3 % of the time; "
            "--moe-paged-stash=false does without (docs/memory.md).");
  const Options asked = with_stash(options_, 1.5);
  EXPECT_EQ(note_on_stash(asked, asked), "") << "no choice";
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
