// The search for layouts: that it keeps what is pinned, fits what it shows, and does not depend on
// the number of threads. What its figures are: tests/cli/plan_search_test.py.
#include "train/layout_search.h"

#include <algorithm>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "options/cluster_options.h"
#include "options/command_line.h"
#include "options/model_options.h"
#include "support/files.h"
#include "train/interrupt.h"
#include "train/layout_estimate.h"
#include "train/layout_trial.h"

namespace troupe {
namespace {

class LayoutSearchTest : public ::testing::Test {
 protected:
  void use(std::vector<std::string> more) {
    std::vector<std::string> words = {
        "plan", "--model",      "quickstart", "--gpus", "8xh100", "--global-batch-size",
        "64",   "--seq-length", "128",        "--bf16"};
    words.insert(words.end(), more.begin(), more.end());
    options_ = parse_command_line(words).options;
    config_ = load_model_config(options_);
    cluster_ = *gpu_cluster_of(options_);
  }
  LayoutSpace make_space() const { return {options_, config_, cluster_.model.gpus_per_nvlink}; }
  LayoutSearch search(int workers) const {
    return search_layouts(make_space(), config_, cluster_, /*top=*/3, workers, {});
  }

  Options options_;
  ModelConfig config_;
  GpuCluster cluster_;
};

TEST_F(LayoutSearchTest, DoesNotDependOnThreads) {
  use({});
  const LayoutSearch one = search(1);
  const LayoutSearch three = search(3);
  ASSERT_EQ(one.best.size(), 3U);
  ASSERT_EQ(three.best.size(), 3U);
  for (size_t i = 0; i < one.best.size(); ++i) {
    EXPECT_EQ(one.best[i].choice, three.best[i].choice) << i;
    EXPECT_EQ(one.best[i].trial.tokens_per_s, three.best[i].trial.tokens_per_s) << i;
  }
  EXPECT_EQ(one.planned, three.planned);
}

// Of 8 experts of 128, 7.3 of 8 ranks have one with ETP 2 and EP 4, 5.3 with EP 8.
TEST_F(LayoutSearchTest, TokensGoToAllRanksWhereNearlyAllHaveTheirExperts) {
  use({"--model", "qwen3-30b-a3b"});
  const LayoutSpace space = make_space();
  size_t spread = 0;
  for (const LayoutChoice& choice : space.enumerate()) {
    if (choice.ep * choice.etp == 1) continue;
    const bool goes_to_all = choice.dispatcher == TokenDispatcher::allgather;
    EXPECT_EQ(goes_to_all, choice.ep < 8) << text_of_sizes(choice);
    ++spread;
  }
  EXPECT_GT(spread, 0U);
}

// The fastest of those that are planned first is slower than the same without folding.
TEST_F(LayoutSearchTest, NoAlternativeIsFasterThanTheBest) {
  use({"--model", "qwen2-57b-a14b", "--gpus", "64xh200", "--seq-length", "4096",
       "--global-batch-size", "256"});
  const LayoutSearch found = search(2);
  ASSERT_FALSE(found.best.empty());
  ASSERT_FALSE(found.alternatives.empty());
  for (const Alternative& each : found.alternatives) {
    if (!each.trial || !each.trial->fits) continue;
    EXPECT_LE(each.trial->tokens_per_s, found.best.front().trial.tokens_per_s) << each.name;
  }
}

// Also where ranks have their parts of one sequence.
TEST_F(LayoutSearchTest, OptimizersAreCutOverWhomeverHasTheSameWeights) {
  use({"--model", "qwen3-30b-a3b", "--seq-length", "4096", "--context-parallel-size", "8"});
  const LayoutSpace space = make_space();
  std::set<ShardingChoice> shardings;
  for (const LayoutChoice& choice : space.enumerate()) shardings.insert(choice.sharding);
  EXPECT_EQ(shardings, (std::set{ShardingChoice::optimizer, ShardingChoice::all}));
}

TEST_F(LayoutSearchTest, TheBestComeFirstAndFit) {
  use({});
  const LayoutSearch found = search(2);
  for (size_t i = 0; i < found.best.size(); ++i) {
    EXPECT_TRUE(found.best[i].trial.fits);
    if (i > 0) {
      EXPECT_LE(found.best[i].trial.tokens_per_s, found.best[i - 1].trial.tokens_per_s);
    }
  }
  EXPECT_FALSE(found.alternatives.empty());
}

TEST_F(LayoutSearchTest, EnumeratesAllThatFlagsLeaveOpen) {
  use({"--tensor-model-parallel-size", "2", "--recompute-granularity", "selective",
       "--micro-batch-size", "2"});
  const LayoutSpace space = make_space();
  bool has_pipelines = false;
  std::set<int32_t> slices_of_experts;
  for (const LayoutChoice& choice : space.enumerate()) {
    slices_of_experts.insert(choice.etp);
    EXPECT_EQ(choice.tp, 2);
    EXPECT_EQ(choice.micro_batch, 2);
    has_pipelines = has_pipelines || choice.pp > 1;
    const Options applied = space.apply(choice);
    EXPECT_EQ(applied.tensor_model_parallel_size, 2);
    EXPECT_EQ(applied.recompute_granularity, options_.recompute_granularity);
  }
  EXPECT_TRUE(has_pipelines);
  EXPECT_EQ(slices_of_experts, (std::set<int32_t>{1, 2})) << "experts whole, or cut as attention";
}

// What the search writes is what it found, for the program that reads it.
TEST_F(LayoutSearchTest, TheFileOfAChoiceIsTheChoice) {
  use({});
  const testing::TempFolder folder;
  const LayoutSpace space = make_space();
  const LayoutChoice choice = space.enumerate().back();
  const auto read = [&](const std::string& text) {
    testing::put_file(folder / "layout.toml", text);
    return parse_command_line(std::vector<std::string>{"plan", "--config", folder / "layout.toml"})
        .options;
  };
  const Options found = read(space.to_file(choice, 1.25));
  EXPECT_EQ(found.tensor_model_parallel_size, choice.tp);
  EXPECT_EQ(found.context_parallel_size, choice.cp);
  EXPECT_EQ(found.pipeline_model_parallel_size, choice.pp);
  EXPECT_EQ(found.expert_model_parallel_size, choice.ep);
  EXPECT_EQ(found.global_batch_size, 64);
  EXPECT_EQ(found.moe_expert_rank_capacity_factor, 1.25);
  EXPECT_TRUE(found.gpus.empty()) << "of plans alone";
  EXPECT_EQ(read(space.to_file(choice, 0)).moe_expert_rank_capacity_factor, std::nullopt);
  use({"--moe-expert-rank-capacity-factor", "2"});
  const LayoutSpace given(options_, config_, cluster_.model.gpus_per_nvlink);
  EXPECT_EQ(read(given.to_file(choice, 1.25)).moe_expert_rank_capacity_factor, 2) << "as was asked";
}

TEST_F(LayoutSearchTest, EndsEarlyWithWhatItHas) {
  use({});
  interrupt_requested() = true;
  const LayoutSearch found = search(2);
  interrupt_requested() = false;
  EXPECT_TRUE(found.interrupted);
  EXPECT_TRUE(found.best.empty());
}

TEST_F(LayoutSearchTest, StagesAreBalancedByTime) {
  use({"--num-layers", "7"});
  const LayoutSpace space = make_space();
  const LayoutEstimator estimator(space, config_, cluster_);
  LayoutChoice choice;
  choice.pp = 2;
  UnitCosts costs;
  costs.layer = 1;
  costs.head = 1;
  // 4 layers and 3 with the head, each of 8 micro-batches of 1 on 2 x 4 ranks: 16 per replica.
  const double seconds = estimator.seconds(costs, choice);
  EXPECT_EQ(choice.stages, "Et*4|t*3L");
  EXPECT_DOUBLE_EQ(seconds, 16 * 4 + 4);
  costs.head = 3;
  estimator.seconds(costs, choice);
  EXPECT_EQ(choice.stages, "Et*5|t*2L");
}

// Stages that are alike are written once, where they are more than two. The fullest rank works
// through 8 P micro-batches of P ranks, the others fill and empty the pipeline once, and the rank
// with most layers has most to update.
TEST_F(LayoutSearchTest, StagesAreWrittenShort) {
  const auto stages = [&](int32_t layers, int32_t pp, int32_t vpp, double seconds,
                          double head = 2) {
    use({"--num-layers", std::to_string(layers)});
    const LayoutSpace space = make_space();
    LayoutChoice choice;
    choice.pp = pp;
    choice.vpp = vpp;
    UnitCosts costs;
    costs.layer = 1;
    costs.head = head;
    costs.update_of_rest = 1e4;
    costs.update_of_layer = 1e5;
    EXPECT_DOUBLE_EQ(LayoutEstimator(space, config_, cluster_).seconds(costs, choice), seconds);
    return choice.stages;
  };
  EXPECT_EQ(stages(30, 8, 1, 64 * 4 + 28 + 4.1e5), "Et*4|(t*4|)*6t*2L");
  EXPECT_EQ(stages(18, 5, 1, 40 * 4 + 16 + 4.1e5), "Et*4|(t*4|)*3t*2L");
  EXPECT_EQ(stages(14, 4, 1, 32 * 4 + 12 + 4.1e5), "Et*4|t*4|t*4|t*2L");
  EXPECT_EQ(stages(14, 2, 2, 16 * 8 + 8 / 2 + 8.1e5), "Et*4|t*4|t*4|t*2L");
  EXPECT_EQ(stages(8, 4, 1, 32 * 3 + 7 + 3.1e5), "Et*3|t*3|t*2|L");
  EXPECT_EQ(stages(8, 8, 1, 64 * 2 + 8 + 2.1e5), "Et*2|(t|)*6L");
  EXPECT_EQ(stages(8, 2, 1, 16 * 4.5 + 4 + 4.1e5, 0.5), "") << "equal ones are not written";
  EXPECT_EQ(stages(8, 1, 1, 8 * 10 + 8.1e5), "");
}

// Layers without experts have a time of their own, and so have those of multi-token prediction,
// whose heads are with the loss. They lie wherever stages become equal; one that serves all depths
// stays on one rank.
TEST_F(LayoutSearchTest, StagesCountLayersOfOtherKinds) {
  const auto stages = [&](std::vector<std::string> flags, double seconds) {
    use(std::move(flags));
    const LayoutSpace space = make_space();
    const LayoutEstimator estimator(space, config_, cluster_);
    LayoutChoice choice;
    choice.pp = 2;
    UnitCosts costs;
    costs.layer = costs.head = 1;
    costs.dense_layer = 3;
    costs.mtp_layer = 1.5;
    EXPECT_DOUBLE_EQ(estimator.seconds(costs, choice), seconds);
    return choice.stages;
  };
  // 5 layers, and 2 with the prediction's layer and two heads.
  EXPECT_EQ(stages({"--num-layers", "7", "--mtp-num-layers", "1"}, 16 * 5.5 + 5), "Et*5|t*2mL");
  EXPECT_EQ(stages({"--num-layers", "2", "--mtp-num-layers", "3"}, 16 * 5.5 + 5), "Et*2m*2|mL");
  const std::vector<std::string> shared = {"--num-layers", "2", "--mtp-num-layers", "3",
                                           "--mtp-use-repeated-layer"};
  EXPECT_EQ(stages(shared, 16 * 6.5 + 4), "Et*2m*3|L");
  // 2 layers of 3, and 5 of 1 with the head.
  EXPECT_EQ(
      stages({"--num-layers", "7", "--moe-layer-freq", "[0]*2+[1]*5", "--ffn-hidden-size", "64"},
             16 * 6 + 6),
      "Et*2|t*5L");
}

// A stage of its own for the loss has none of the prediction's layers.
TEST_F(LayoutSearchTest, TheLossMayStandAlone) {
  use({"--num-layers", "7", "--mtp-num-layers", "1"});
  const LayoutSpace space = make_space();
  UnitCosts costs;
  costs.layer = costs.mtp_layer = 0.001;
  costs.head = 1;
  LayoutChoice choice;
  choice.pp = 2;
  LayoutEstimator(space, config_, cluster_).seconds(costs, choice);
  EXPECT_EQ(choice.stages, "Et*7m|L");
}

// Of two ranks, the first has begun 2 forwards of its 4 layers before its first backward; with two
// stages of a rank, 2 (P - 1) + (V - 1) P + 1 = 5 of 2 layers each.
TEST_F(LayoutSearchTest, KeepsWhatIsInFlightOnTheFirstRank) {
  use({"--num-layers", "8"});
  const LayoutSpace space = make_space();
  const LayoutEstimator estimator(space, config_, cluster_);
  UnitCosts costs;
  costs.layer_bytes = 1e12;  // beside which the state is nothing: less than 1e9 bytes
  LayoutChoice choice;
  choice.pp = 2;
  EXPECT_NEAR(static_cast<double>(estimator.bytes(costs, choice).all), 8e12, 1e9);
  choice.vpp = 2;
  EXPECT_NEAR(static_cast<double>(estimator.bytes(costs, choice).all), 10e12, 1e9);
}

// Of four ranks, the second has begun 3 forwards of its 6 layers.
TEST_F(LayoutSearchTest, KeepsWhatIsInFlightOnTheRankThatHasMost) {
  use({"--num-layers", "9"});
  const LayoutSpace space = make_space();
  const LayoutEstimator estimator(space, config_, cluster_);
  UnitCosts costs;
  costs.layer_bytes = 1e12;
  costs.rest_bytes = 5e12;
  LayoutChoice choice;
  choice.pp = 4;
  choice.stages = "Et|t*6|t|tL";
  EXPECT_NEAR(static_cast<double>(estimator.bytes(costs, choice).all), (3 * 6 + 5) * 1e12, 1e9);
}

// A layer of multi-token prediction keeps what the decoder's layers do.
TEST_F(LayoutSearchTest, KeepsWhatLayersOfMultiTokenPredictionHaveInFlight) {
  use({"--num-layers", "5", "--mtp-num-layers", "2"});
  const LayoutSpace space = make_space();
  const LayoutEstimator estimator(space, config_, cluster_);
  UnitCosts costs;
  costs.layer_bytes = 1e12;
  LayoutChoice choice;
  choice.pp = 4;
  choice.stages = "Et|t|t*3m*2|L";
  EXPECT_NEAR(static_cast<double>(estimator.bytes(costs, choice).all), 2 * 5e12, 1e9);
}

// It takes longer than one of them by embedding, norms and the product that joins its inputs. Its
// head is the model's, so a model without such layers has the same costs otherwise.
TEST_F(LayoutSearchTest, LayersOfMultiTokenPredictionAreMeasured) {
  const auto measured = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"--num-layers", "8", "--moe-layer-freq", "[0]*2+[1]*6",
                                 "--ffn-hidden-size", "64"});
    use(flags);
    const LayoutSpace space = make_space();
    return LayoutEstimator(space, config_, cluster_).measure(LayoutChoice{});
  };
  const UnitCosts plain = measured({});
  const UnitCosts predicting = measured({"--mtp-num-layers", "2"});
  EXPECT_GT(predicting.mtp_layer, predicting.layer);
  EXPECT_EQ(plain.mtp_layer, 0);
  EXPECT_EQ(plain.layer, predicting.layer);
  EXPECT_EQ(plain.dense_layer, predicting.dense_layer);
  EXPECT_EQ(plain.head, predicting.head);
}

// Whether there are layers without experts, whose time is told from that of the head.
TEST_F(LayoutSearchTest, TheHeadCostsWhatItDoesWithoutDenseLayers) {
  const auto head_of = [&](const std::string& experts_in) {
    use({"--model", "qwen3-30b-a3b", "--num-layers", "8", "--seq-length", "4096",
         "--moe-layer-freq", experts_in, "--ffn-hidden-size", "64"});
    const LayoutSpace space = make_space();
    return LayoutEstimator(space, config_, cluster_).measure(LayoutChoice{}).head;
  };
  const double all = head_of("[1]*8");
  EXPECT_NEAR(head_of("[0]*2+[1]*6"), all, 0.05 * all);
}

// Whatever a pipeline's stages count, a layer's costs are those of one stage.
TEST_F(LayoutSearchTest, CostsOfALayerDoNotDependOnThePipeline) {
  use({});
  LayoutChoice choice;
  const auto measured = [&] {
    const LayoutSpace space = make_space();
    return LayoutEstimator(space, config_, cluster_).measure(choice);
  };
  const UnitCosts one = measured();
  choice.pp = 2;
  options_.account_for_embedding_in_pipeline_split = true;
  options_.account_for_loss_in_pipeline_split = true;
  const UnitCosts stages = measured();
  EXPECT_EQ(one.layer, stages.layer);
  EXPECT_EQ(one.head, stages.head);
  EXPECT_EQ(one.layer_bytes, stages.layer_bytes);
  EXPECT_EQ(one.rest_bytes, stages.rest_bytes);
  EXPECT_GT(one.layer, 0);
  EXPECT_GT(one.head, 0);
  EXPECT_GT(one.update_of_layer, 0);
  EXPECT_GT(one.layer_bytes, 0);
  EXPECT_GT(one.rest_bytes, 0);
}

// What says how layers are cut into stages, and how their micro-batches follow each other.
TEST_F(LayoutSearchTest, CostsOfALayerAreThoseOfOneStageWhateverIsAsked) {
  LayoutChoice choice;
  choice.recompute = RecomputeChoice::full;
  const auto costs = [&](std::vector<std::string> more) {
    std::vector<std::string> words = {"--num-layers", "8", "--pipeline-model-parallel-size", "2"};
    words.insert(words.end(), more.begin(), more.end());
    use(words);
    const LayoutSpace space = make_space();
    const UnitCosts found = LayoutEstimator(space, config_, cluster_).measure(choice);
    return std::vector{found.layer,           found.dense_layer,    found.head,
                       found.update_of_layer, found.update_of_rest, found.layer_bytes,
                       found.rest_bytes};
  };
  const std::vector<double> plain = costs({});
  for (const std::vector<std::string>& flags : std::vector<std::vector<std::string>>{
           {"--num-virtual-stages-per-pipeline-rank", "2"},
           {"--num-layers-per-virtual-pipeline-stage", "2"},
           {"--pipeline-model-parallel-layout", "Et*3|t*5L"},
           {"--decoder-first-pipeline-num-layers", "3"},
           {"--decoder-last-pipeline-num-layers", "3"},
           {"--num-virtual-stages-per-pipeline-rank", "2",
            "--microbatch-group-size-per-virtual-pipeline-stage", "4"},
           {"--pipeline-schedule", "zb-h1"},
           {"--rampup-batch-size", "32", "32", "1000", "--train-samples", "10000"}}) {
    EXPECT_EQ(costs(flags), plain) << flags.front();
  }
}

// One GPU, and layers that are all alike or alternate: steps are as long, and as large, as their
// parts.
TEST_F(LayoutSearchTest, AnEstimateOfOneStageIsItsPlan) {
  for (const std::vector<std::string>& layers : std::vector<std::vector<std::string>>{
           {"--num-layers", "7"},
           {"--num-layers", "8", "--moe-layer-freq", "[1,0]*4", "--ffn-hidden-size", "64"}}) {
    std::vector<std::string> words = {"--gpus", "1xh100", "--global-batch-size", "8"};
    words.insert(words.end(), layers.begin(), layers.end());
    use(words);
    const LayoutSpace space = make_space();
    const LayoutEstimator estimator(space, config_, cluster_);
    LayoutChoice choice;
    const UnitCosts costs = estimator.measure(choice);
    const LayoutTrial trial = try_out(space.apply(choice), config_, cluster_);
    const double seconds = estimator.seconds(costs, choice);
    EXPECT_NEAR(seconds, trial.time.seconds, 1e-9 * seconds) << layers.back();
    const auto bytes = static_cast<double>(estimator.bytes(costs, choice).all);
    // Blocks are rounded to 256 bytes, of which each of 8 layers keeps less than 16.
    EXPECT_NEAR(bytes, static_cast<double>(trial.bytes), 8 * 16 * 256) << layers.back();
  }
}

// 3 of the first 8 layers have experts, and the layers do not repeat.
TEST_F(LayoutSearchTest, ALayerOfManyKindsCostsTheirMean) {
  const auto cost_of_layer = [&](const std::string& kinds) {
    use({"--num-layers", "12", "--moe-layer-freq", kinds, "--ffn-hidden-size", "4096"});
    const LayoutSpace space = make_space();
    return LayoutEstimator(space, config_, cluster_).measure({}).layer;
  };
  const double with_experts = cost_of_layer("1");
  const double mixed = cost_of_layer("[1,0,0,1,0,1,0,0,0,0,1,1]");
  // Layers that alternate: the mean of both kinds.
  const double dense = 2 * cost_of_layer("[1,0]*6") - with_experts;
  ASSERT_GT(std::abs(dense - with_experts), 0.1 * with_experts);
  EXPECT_NEAR(mixed, (3 * with_experts + 5 * dense) / 8, 0.02 * mixed);
}

// Layers that alternate cost the mean of both kinds, whatever tells these apart.
TEST_F(LayoutSearchTest, LayersThatAlternateCostTheirMean) {
  const auto check = [&](const std::string& model, std::vector<bool> ModelConfig::*kinds) {
    use({"--model", model, "--num-layers", "8", "--seq-length", "4096"});
    const auto cost_of_layer = [&](bool even, bool odd) {
      for (size_t i = 0; i < 8; ++i) (config_.*kinds)[i] = i % 2 == 0 ? even : odd;
      const LayoutSpace space = make_space();
      return LayoutEstimator(space, config_, cluster_).measure({}).layer;
    };
    const double one = cost_of_layer(true, true);
    const double other = cost_of_layer(false, false);
    ASSERT_GT(std::abs(one - other), 0.01 * one) << model;
    // Sums of the same times in another order.
    EXPECT_NEAR(cost_of_layer(true, false), (one + other) / 2, 1e-9 * one) << model;
    EXPECT_NEAR(cost_of_layer(false, true), (one + other) / 2, 1e-9 * one) << model;
  };
  check("gpt-oss-20b", &ModelConfig::window_layers);
  check("qwen3-next-80b-a3b", &ModelConfig::linear_attention_layers);
}

TEST_F(LayoutSearchTest, SaysHowFarEachPartOfItIs) {
  use({});
  std::map<std::string, std::vector<std::pair<uint64_t, uint64_t>>> said;
  const auto note = [&](const std::string& part) {
    return [&said, part](uint64_t done, uint64_t all) { said[part].emplace_back(done, all); };
  };
  search_layouts(make_space(), config_, cluster_, /*top=*/3, /*workers=*/1,
                 {.estimating = note("estimating"), .planning = note("planning")});
  for (const auto& [part, steps] : said) {
    ASSERT_FALSE(steps.empty());
    // Planning begins with a report that nothing is done, since each layout may take seconds.
    const size_t first = part == "planning" ? 0 : 1;
    for (size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(steps[i].first, i + first) << part;
      EXPECT_LE(steps[i].first, steps[i].second) << part;
    }
  }
  EXPECT_EQ(said.size(), 2U);
}

TEST_F(LayoutSearchTest, TheLeastStateIsThatOfAllParameters) {
  use({});
  const auto parameters = static_cast<double>(Model(config_).parameter_count());
  for (const bool bf16 : {false, true}) {
    options_.compute_dtype = bf16 ? DType::bf16 : DType::f32;
    const LayoutSpace space = make_space();
    const LayoutEstimator estimator(space, config_, cluster_);
    LayoutChoice choice;
    EXPECT_DOUBLE_EQ(estimator.least_state_bytes(choice), parameters * (bf16 ? 4 : 8));
    choice.sharding = ShardingChoice::all;
    EXPECT_DOUBLE_EQ(estimator.least_state_bytes(choice),
                     parameters * (bf16 ? 4 : 8) / options_.ranks);
  }
}

// Experts are divided among other ranks than the rest, and both by the pipeline.
TEST_F(LayoutSearchTest, TheLeastStateIsOfTheSlicesOfARank) {
  use({"--moe-layer-freq", "[0]*1+[1]*3", "--ffn-hidden-size", "64", "--num-layers", "4"});
  const LayoutSpace space = make_space();
  const Model model(config_);
  double of_experts = 0;
  double others = 0;
  for (const ParameterSpec& parameter : model.parameters()) {
    (parameter.gradient_class == GradientClass::expert ? of_experts : others) +=
        static_cast<double>(parameter.whole_shape.elements());
  }
  ASSERT_GT(of_experts, 0);
  LayoutChoice choice;
  choice.tp = 2;
  choice.pp = 2;
  choice.ep = 4;
  choice.etp = 2;
  const LayoutEstimator estimator(space, config_, cluster_);
  EXPECT_DOUBLE_EQ(estimator.least_state_bytes(choice), 4 * (of_experts / 16 + others / 4));
  choice.sharding = ShardingChoice::all;
  EXPECT_DOUBLE_EQ(estimator.least_state_bytes(choice), 4 * (of_experts + others) / 8);
}

TEST_F(LayoutSearchTest, ATrialFitsByTheBytesOfItsRoom) {
  use({"--expert-model-parallel-size", "8", "--micro-batch-size", "1"});
  LayoutTrial trial;
  choose_room(options_, config_, cluster_, trial);
  EXPECT_GT(trial.bytes, 0U);
  EXPECT_TRUE(trial.fits);
  cluster_.model.memory_bytes = trial.bytes - 1;
  LayoutTrial same;
  choose_room(options_, config_, cluster_, same);
  EXPECT_EQ(same.bytes, trial.bytes);
  EXPECT_FALSE(same.fits);
}

TEST_F(LayoutSearchTest, EstimatesCountAtLeastTheState) {
  use({});
  const LayoutSpace space = make_space();
  const LayoutEstimator estimator(space, config_, cluster_);
  for (const LayoutChoice& choice : space.enumerate()) {
    try {
      const LayoutEstimator::Bytes bytes = estimator.bytes(UnitCosts{}, choice);
      EXPECT_LE(estimator.least_state_bytes(choice), static_cast<double>(bytes.state))
          << text_of_sizes(choice);
    } catch (const UserError&) {
      // Not a layout of this model.
    }
  }
}

// What a search finds, by the sizes of its layouts: the best, and what stands beside the first.
std::string text_of(const LayoutSearch& found) {
  std::string text = fmt::format("{} refused {} too large {} planned {}:", found.choices,
                                 found.refused, found.too_large, found.planned);
  for (const FoundLayout& each : found.best) text += " " + text_of_sizes(each.choice) + ",";
  for (const Alternative& each : found.alternatives) {
    text += fmt::format(" {} ({}{})", each.name, text_of_sizes(each.choice),
                        !each.trial        ? " refused"
                        : each.trial->fits ? ""
                                           : " too large");
  }
  if (found.nearest) text += " nearest " + text_of_sizes(found.nearest->choice);
  return text;
}

// Where the state of each layout is too large: of those with the least the one that recomputes
// most, and of several the first.
TEST_F(LayoutSearchTest, TheNearestHasTheLeastState) {
  use({"--tensor-model-parallel-size", "2"});
  cluster_.model.memory_bytes = 1'000'000;
  const LayoutSpace space = make_space();
  const LayoutEstimator estimator(space, config_, cluster_);
  UnitCosts equal;
  equal.layer = equal.dense_layer = equal.head = 1;
  std::optional<LayoutChoice> expected;
  double least = 0;
  for (LayoutChoice choice : space.enumerate()) {
    const double bytes = estimator.least_state_bytes(choice);
    estimator.seconds(equal, choice);  // which balances the stages
    const bool is_less =
        !expected || bytes < least || (bytes == least && choice.recompute > expected->recompute);
    if (!is_less) continue;
    expected = choice;
    least = bytes;
  }
  const LayoutSearch found = search(1);
  ASSERT_TRUE(found.nearest);
  EXPECT_EQ(found.nearest->choice, *expected);
  EXPECT_EQ(found.nearest->choice.recompute, RecomputeChoice::full);
  EXPECT_EQ(found.too_large, found.choices);
}

// Where the state fits and the activations of no layout do, it is the one that is estimated to take
// the fewest bytes. Estimates may be 8 % too high: from there on layouts are planned.
TEST_F(LayoutSearchTest, TheNearestTakesTheFewestBytes) {
  use({"--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "4",
       "--micro-batch-size", "8", "--seq-length", "256"});
  const LayoutSpace space = make_space();
  const LayoutEstimator estimator(space, config_, cluster_);
  std::optional<LayoutChoice> expected;
  uint64_t least = 0;
  uint64_t most_state = 0;
  for (LayoutChoice choice : space.enumerate()) {
    const UnitCosts costs = estimator.measure(choice);
    estimator.seconds(costs, choice);  // which balances the stages
    const LayoutEstimator::Bytes bytes = estimator.bytes(costs, choice);
    most_state = std::max(most_state, bytes.state);
    if (expected && bytes.all >= least) continue;
    expected = choice;
    least = bytes.all;
  }
  const auto beyond = static_cast<uint64_t>(static_cast<double>(least) * (1 - 0.08));
  ASSERT_GT(beyond, most_state);
  cluster_.model.memory_bytes = beyond;
  const LayoutSearch found = search(1);
  ASSERT_TRUE(found.nearest);
  EXPECT_EQ(found.nearest->choice, *expected);
  EXPECT_EQ(found.too_large, found.choices);
  EXPECT_EQ(found.planned, 0);
  ++cluster_.model.memory_bytes;
  EXPECT_EQ(search(1).planned, 1);
}

// Of few choices, what one would have thought of instead: every size of it follows from the best.
TEST_F(LayoutSearchTest, AlternativesFollowFromTheBest) {
  const auto found = [&](std::vector<std::string> more, uint64_t memory_bytes = 0) {
    std::vector<std::string> words = {"--micro-batch-size", "1", "--context-parallel-size", "1",
                                      "--use-distributed-optimizer"};
    words.insert(words.end(), more.begin(), more.end());
    use(words);
    if (memory_bytes > 0) cluster_.model.memory_bytes = memory_bytes;
    return text_of(search(1));
  };
  const std::vector<std::string> wide = {"--model", "qwen3-30b-a3b",           "--num-layers",
                                         "4",       "--recompute-granularity", "selective"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> words = wide;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  EXPECT_EQ(
      found(with({"--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "1"})),
      "6 refused 0 too large 0 planned 9: TP4 EP8, TP4 EP8, TP4 EP2 ETP4, experts on attention's "
      "mesh, without folding (TP4 EP2 ETP4) dispatcher alltoall (TP4 EP8)");
  EXPECT_EQ(
      found(with({"--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"})),
      "10 refused 0 too large 0 planned 8: TP2 PP2x2 EP4, TP2 PP2 EP4, TP2 PP2x2 EP2 ETP2, experts "
      "on attention's mesh, without folding (TP2 PP2x2 EP2 ETP2) dispatcher alltoall (TP2 PP2x2 "
      "EP4)");
  EXPECT_EQ(found(with({"--gpus", "16xh100", "--tensor-model-parallel-size", "1"})),
            "16 refused 0 too large 0 planned 13: PP2x2 EP8, PP2x2 EP8, PP2 EP8, experts across "
            "nodes (EP16) no pipeline (EP8) dispatcher alltoall (PP2x2 EP8)");
  EXPECT_EQ(found(with({"--expert-model-parallel-size", "4", "--tensor-model-parallel-size", "1"})),
            "3 refused 0 too large 0 planned 7: PP2x2 EP4, PP2x2 EP4, PP2 EP4, no pipeline (EP4) "
            "dispatcher alltoall (PP2x2 EP4)");
  EXPECT_EQ(found({"--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"}),
            "30 refused 0 too large 0 planned 6: TP2 PP2, TP2 PP2, TP2 PP2x2, experts on "
            "attention's mesh, without folding (TP2 PP2 ETP2) full recompute (TP2 PP2)");
  EXPECT_EQ(found({"--tensor-model-parallel-size", "2"}, 1000000),
            "60 refused 0 too large 60 planned 0: nearest TP2 PP4 ETP2");
  EXPECT_EQ(found(with({"--tensor-model-parallel-size", "1"}), 1500000000),
            "12 refused 0 too large 12 planned 0: nearest PP4 EP2");
}

}  // namespace
}  // namespace troupe
