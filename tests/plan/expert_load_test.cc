// Loads of the fullest rank against values that follow by hand, and what a step's time makes of
// them.
#include "plan/expert_load.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <iterator>
#include <memory>
#include <numbers>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "ops/routing/clone_placement/clone_placement.h"
#include "options/layout_options.h"
#include "passes/memory_plan.h"
#include "plan/plan_test_support.h"
#include "plan/step_time.h"

namespace troupe {
namespace {

// The integral is exact to the fourth power of its step, 1e-2 of a width; twenty times that.
constexpr double kIntegral = 2e-7;

TEST(ExpertLoad, IsEvenUnlessSaid) {
  EXPECT_TRUE(ExpertLoad().is_even());
  EXPECT_EQ(ExpertLoad().of(3, 7), 1);
  EXPECT_EQ(ExpertLoad().largest(7), 1);
}

TEST(ExpertLoad, DrawnIsTheExpectedLargestShare) {
  // The largest of n exponential variables: 1 + 1/2 + ... + 1/n.
  const ExpertLoad exponential = ExpertLoad::dirichlet(1, 4, 1);
  EXPECT_NEAR(exponential.of(0, 4), 25.0 / 12, kIntegral);
  // Two variables of the parameter 2: 4 less the smaller one, the integral of (1 + x)^2 exp(-2x).
  EXPECT_NEAR(exponential.of(0, 2), (4 - 1.25) / 2, kIntegral);
  EXPECT_EQ(exponential.of(0, 1), 1);
  // Of two shares of the parameter 1/2, one has the arcsine distribution: 1/2 + 1/pi is the larger.
  EXPECT_NEAR(ExpertLoad::dirichlet(0.5, 2, 1).of(0, 2), 1 + 2 / std::numbers::pi, kIntegral);
}

TEST(ExpertLoad, DrawnGoesFromAllOnOneRankToEven) {
  // With ALPHA to 0 one of four ranks has all, with ALPHA = a large they differ by 1/sqrt(a).
  EXPECT_NEAR(ExpertLoad::dirichlet(1e-3, 4, 1).of(0, 4), 4, 0.02);
  EXPECT_NEAR(ExpertLoad::dirichlet(1e6, 4, 1).of(0, 4), 1, 3e-3);
  double before = 4.1;
  for (const double alpha : {1e-3, 0.1, 0.9, 1.1, 10.0, 1e4, 1e6}) {
    const double load = ExpertLoad::dirichlet(alpha, 4, 1).of(0, 4);
    EXPECT_LT(load, before) << alpha;
    EXPECT_GT(load, 1) << alpha;
    before = load;
  }
}

TEST(ExpertLoad, DrawnIsNoMoreThanTokensCanChoose) {
  // A token's two experts are different: one expert has at most half of the rows.
  const ExpertLoad load = ExpertLoad::dirichlet(1e-3, 4, 2);
  EXPECT_EQ(load.of(0, 4), 2);
  EXPECT_NEAR(load.of(0, 2), 2, 0.01);
}

TEST(ExpertLoad, MeasuredIsTheMeanOfTheStepsFullestRanks) {
  using Step = std::vector<ExpertLoad::LayerRows>;
  const std::vector<Step> steps = {Step{{1, {6, 2, 4, 4}}, {3, {8, 8, 0, 0}}},
                                   Step{{1, {4, 4, 4, 4}}, {3, {0, 0, 0, 0}}}};
  const ExpertLoad load = ExpertLoad::measured(steps);
  EXPECT_EQ(load.of(1, 4), 1.25) << "the mean of 4 x 6 / 16 and 1";
  EXPECT_EQ(load.of(1, 2), 1) << "experts 0 and 1 have 8 of 16 rows";
  EXPECT_EQ(load.of(3, 2), 2) << "the second step has no rows there";
  EXPECT_EQ(load.of(7, 2), 1.5) << "another layer: the mean of both";
  EXPECT_EQ(load.mean(2), 1.5);
  EXPECT_EQ(load.largest(2), 2);
  EXPECT_EQ(load.averaged().of(3, 2), 1.5);
  EXPECT_EQ(load.averaged().largest(2), 1.5);
}

// The hot expert's own rank and the other each get half, or what a token cannot choose otherwise.
TEST(ExpertLoad, OfRanksIsThatAfterCopies) {
  const std::vector<ExpertLoad::LayerRows> step = {
      {0, {70, 10, 10, 10}}, {1, {25, 25, 25, 25}}, {2, {40, 40, 10, 10}}};
  const auto load = [&](int32_t clones) { return ExpertLoad::measured({&step, 1}, clones); };
  EXPECT_EQ(load(0).of(0, 4), 2.8);
  EXPECT_EQ(load(1).of(0, 4), 1) << "15 rows to each of the three others";
  EXPECT_EQ(load(0).of(0, 2), 1.6);
  EXPECT_EQ(load(1).of(0, 2), 1);
  EXPECT_EQ(load(1).of(1, 4), 1);
  EXPECT_EQ(load(1).of(2, 4), 1) << "each of two ranks gives 15 rows to another";
  EXPECT_EQ(load(1).of(0, 1), 1);
}

TEST(ExpertLoad, DrawnWithCopiesIsAsEvenAsTheyMakeIt) {
  for (const double alpha : {0.1, 1.0, 10.0}) {
    SCOPED_TRACE(alpha);
    const double without = ExpertLoad::dirichlet(alpha, 16, 4).of(0, 4);
    const double one = ExpertLoad::dirichlet(alpha, 16, 4, 1).of(0, 4);
    const double four = ExpertLoad::dirichlet(alpha, 16, 4, 4).of(0, 4);
    EXPECT_LT(one, without);
    EXPECT_LE(four, one);
    EXPECT_GE(four, 1);
    EXPECT_LT(four, 1 + 3.0 / 32) << "what each of three ranks lacks is not worth a copy";
  }
  EXPECT_NEAR(ExpertLoad::dirichlet(1e-3, 4, 1, 1).of(0, 4), 1, 1e-3) << "one hot expert";
  EXPECT_EQ(ExpertLoad::dirichlet(1e-3, 4, 4, 1).of(0, 1), 1);
}

// Shares that the standard library draws, divided by the same rule. Means of 256 draws and of 4,000
// differ by six of their deviations at most.
TEST(ExpertLoad, DrawnWithCopiesIsTheMeanOfShares) {
  struct Case {
    double alpha;
    int32_t experts;
    int32_t parts;
  };
  for (const auto& [alpha, experts, parts] : {Case{0.3, 64, 16}, Case{3, 64, 16}, {1000, 4, 4}}) {
    SCOPED_TRACE(alpha);
    constexpr int kDraws = 4000;
    std::mt19937_64 generator(7);
    std::gamma_distribution<double> gamma(alpha);
    double sum = 0;
    double squares = 0;
    for (int draw = 0; draw < kDraws; ++draw) {
      std::vector<double> shares;
      for (int32_t i = 0; i < experts; ++i) shares.push_back(gamma(generator));
      const double all = std::accumulate(shares.begin(), shares.end(), 0.0);
      std::vector<int32_t> rows;
      for (const double each : shares) rows.push_back(static_cast<int32_t>(each / all * 1e7));
      const auto of_ranks = rows_with_clones(rows, {.parts = parts, .clones = 1});
      const double load = *std::max_element(of_ranks.begin(), of_ranks.end()) * parts / 1e7;
      sum += load;
      squares += load * load;
    }
    const double mean = sum / kDraws;
    const double deviation = std::sqrt(squares / kDraws - mean * mean);
    EXPECT_NEAR(ExpertLoad::dirichlet(alpha, experts, 1, 1).of(0, parts), mean,
                6 * deviation * (1.0 / 16 + 1 / std::sqrt(kDraws)));
  }
}

// A step on two GPUs, each with half of the experts, that nothing but its products or its links
// limits.
class LoadedStep : public ::testing::Test {
 protected:
  double ramp_ = 1.5e-6;  // of each kernel (docs/benchmarks/plan_time.md)

  void use(const std::string& dispatcher) {
    const std::string flags =
        "--model mixtral-tiny --seq-length 512 --max-position-embeddings 512 --bf16 --gpus 2xh100 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type " +
        dispatcher;
    program_ = testing::program_of(flags);
    std::istringstream stream("plan " + flags);
    const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
    const Options options = parse_command_line(words).options;
    layout_ = run_layout_of(options, load_model_config(options)).layout;
    cluster_.gpus = 2;
    cluster_.model.traits = {.compute_capability = 90, .multiprocessors = 132};
    cluster_.model.bf16_flops = cluster_.model.f32_flops = 1e9;
    cluster_.model.memory_bandwidth = cluster_.model.host_bandwidth = 1e18;
    cluster_.model.nvlink_bandwidth = 1e6;
    memory_ = plan_memory(*program_, 1, Device::cuda, cluster_.model.traits);
  }
  TimedProgram timed(const ExpertLoad& load) const {
    GpuCluster cluster = cluster_;
    cluster.expert_load = load;
    return time_program(*program_, memory_, cluster, *layout_, 0);
  }
  static ExpertLoad with_load(double first_rank) {
    const std::vector<ExpertLoad::LayerRows> step = {
        {0, {1000 * first_rank, 0, 0, 0, 1000 * (2 - first_rank), 0, 0, 0}}};
    return ExpertLoad::measured({&step, 1});
  }
  // Seconds of the operations of a kind, over those with even loads, beside the ramp.
  double ratio(std::string_view kind, const ExpertLoad& load) const {
    const TimedProgram even = timed({});
    const TimedProgram uneven = timed(load);
    double before = 0;
    double after = 0;
    for (int32_t i = 0; i < program_->op_count(); ++i) {
      if (program_->op(i).spec->name != kind) continue;
      const bool computes = even.operations[static_cast<size_t>(i)].part != TimePart::exchange;
      before += even.operations[static_cast<size_t>(i)].seconds - (computes ? ramp_ : 0);
      after += uneven.operations[static_cast<size_t>(i)].seconds - (computes ? ramp_ : 0);
    }
    EXPECT_GT(before, 0) << kind;
    return after / before;
  }

  std::unique_ptr<Program> program_;
  std::optional<Layout> layout_;
  MemoryPlan memory_;
  GpuCluster cluster_;
};

TEST_F(LoadedStep, OfEvenLoadsIsThatWithoutAny) {
  use("alltoall");
  const TimedProgram without = timed({});
  const TimedProgram even = timed(with_load(1));
  for (size_t i = 0; i < without.operations.size(); ++i) {
    EXPECT_EQ(even.operations[i].seconds, without.operations[i].seconds) << i;
  }
}

TEST_F(LoadedStep, ProductsOfExpertsHaveTheRowsOfTheFullestRank) {
  use("allgather");
  // 1,024 tokens choose two of eight experts each: 256 rows of an expert. The rate of r rows is
  // r / (r + 85) of the best, so r rows take as long as r + 85 would at that.
  constexpr double kTolerance = 1e-6;  // of sums of doubles, and of the ramp that is subtracted
  EXPECT_NEAR(ratio("grouped_linear", with_load(1.5)), (1.5 * 256 + 85) / (256 + 85), kTolerance);
  EXPECT_NEAR(ratio("linear", with_load(1.5)), 1, kTolerance);
  // With this dispatcher all tokens go to all ranks.
  EXPECT_NEAR(ratio("all_gather", with_load(1.5)), 1, kTolerance);
}

TEST_F(LoadedStep, AProcessorIsFastWithFewRows) {
  use("allgather");
  cluster_.model.traits.compute_capability = kNoGpu;
  ramp_ = 1e-5;
  // There r rows reach r / (r + 16) of the best rate.
  EXPECT_NEAR(ratio("grouped_linear", with_load(1.5)), (1.5 * 256 + 16) / (256 + 16), 1e-6);
}

TEST_F(LoadedStep, AProcessorsAttentionIsFastWithManyKeys) {
  const auto seconds = [&](const std::string& sequence) {
    use("alltoall --seq-length " + sequence);
    cluster_.model.traits.compute_capability = kNoGpu;
    ramp_ = 1e-5;
    const TimedProgram timed = this->timed({});
    double sum = 0;
    for (int32_t i = 0; i < program_->op_count(); ++i) {
      if (std::string_view(program_->op(i).spec->name) != "attention") continue;
      sum += timed.operations[static_cast<size_t>(i)].seconds - ramp_;
    }
    return sum;
  };
  // A query has half of the sequence's keys, and itself. With n keys the rate is n / (n + 78) of
  // the best, so a query takes as long as n + 78 keys would at that.
  EXPECT_NEAR(seconds("512") / seconds("256"), 2 * (256.5 + 78) / (128.5 + 78), 1e-6);
}

TEST_F(LoadedStep, RowsPaddedToACapacityAreTheSameForAnyLoad) {
  use("allgather --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity");
  EXPECT_EQ(ratio("grouped_linear", with_load(1.5)), 1);
}

TEST_F(LoadedStep, ExchangesCarryWhatTheFullestRankGets) {
  use("alltoall");
  // A rank has none of a token's two experts with (4 x 3) / (8 x 7), so 512 tokens of each rank
  // make 2 x 512 x 11/14 = 805 rows for a rank, of 1,024 that may come.
  constexpr double kTolerance = 1e-9;
  EXPECT_NEAR(ratio("send_rows", with_load(1.25)), 1.25, kTolerance);
  EXPECT_NEAR(ratio("send_rows", with_load(1.5)), 1024.0 / 805, kTolerance);
  EXPECT_NEAR(ratio("return_rows", with_load(1.25)), 1.25, kTolerance);
  EXPECT_NEAR(ratio("exchange_counts", with_load(1.5)), 1, kTolerance);
  use("flex");
  EXPECT_NEAR(ratio("push_rows", with_load(1.25)), 1.25, kTolerance);
  EXPECT_NEAR(ratio("push_rows_back", with_load(1.5)), 1024.0 / 805, kTolerance);
}

}  // namespace
}  // namespace troupe
