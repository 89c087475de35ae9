// What the search for layouts chooses among, and the flags that say a choice: exact texts.
#include "train/layout_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "options/cluster_options.h"
#include "options/command_line.h"
#include "options/model_options.h"

namespace troupe {
namespace {

class ChoicesOfLayouts : public ::testing::Test {
 protected:
  void use(const std::vector<std::string>& more) {
    std::vector<std::string> words = {
        "plan", "--model",      "quickstart", "--gpus", "8xh100", "--global-batch-size",
        "64",   "--seq-length", "128",        "--bf16"};
    words.insert(words.end(), more.begin(), more.end());
    options_ = parse_command_line(words).options;
    config_ = load_model_config(options_);
    gpus_per_nvlink_ = gpu_cluster_of(options_)->model.gpus_per_nvlink;
  }
  LayoutSpace space() const { return {options_, config_, gpus_per_nvlink_}; }

  // How many choices there are, and the values of each of their fields.
  std::string summary(const std::vector<std::string>& more) {
    use(more);
    const std::vector<LayoutChoice> choices = space().enumerate();
    const auto values = [&](const auto& of) {
      std::set<int> found;
      for (const LayoutChoice& choice : choices) found.insert(static_cast<int>(of(choice)));
      return fmt::format("{}", fmt::join(found, ","));
    };
    using Choice = const LayoutChoice&;
    return fmt::format(
        "{}: tp {} cp {} pp {} vpp {} ep {} etp {} mbs {} recompute {} sharding {} to {}",
        choices.size(), values([](Choice c) { return c.tp; }),
        values([](Choice c) { return c.cp; }), values([](Choice c) { return c.pp; }),
        values([](Choice c) { return c.vpp; }), values([](Choice c) { return c.ep; }),
        values([](Choice c) { return c.etp; }), values([](Choice c) { return c.micro_batch; }),
        values([](Choice c) { return c.recompute; }), values([](Choice c) { return c.sharding; }),
        values([](Choice c) { return c.dispatcher; }));
  }
  std::string flags(const LayoutChoice& choice) const {
    std::string text;
    for (const auto& [name, value] : space().flags_of(choice)) {
      text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
    }
    return text;
  }

  static LayoutChoice experts_over(int32_t ep, int32_t etp) {
    LayoutChoice choice;
    choice.ep = ep;
    choice.etp = etp;
    return choice;
  }

  Options options_;
  ModelConfig config_;
  int32_t gpus_per_nvlink_ = 0;
};

TEST_F(ChoicesOfLayouts, AreAllThatDivide) {
  EXPECT_EQ(summary({}),
            "612: tp 1,2,4,8 cp 1 pp 1,2,4 vpp 1,2 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 recompute "
            "0,1,2 sharding 0,1,2 to 0,1");
  EXPECT_EQ(summary({"--gpus", "1xh100"}),
            "9: tp 1 cp 1 pp 1 vpp 1 ep 1 etp 1 mbs 1,2,4 recompute 0,1,2 sharding 0 to 0");
  EXPECT_EQ(summary({"--gpus", "6xh100", "--global-batch-size", "36"}),
            "132: tp 1,2 cp 1 pp 1,2,3 vpp 1,2 ep 1,2 etp 1,2 mbs 1,2,4 recompute 0,1,2 sharding "
            "0,1,2 to 0,1");
  EXPECT_EQ(summary({"--num-layers", "20", "--gpus", "64xh100"}),
            "2262: tp 1,2,4,8 cp 1 pp 1,2,4,8,16 vpp 1,2,4,8 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 "
            "recompute 0,1,2 sharding 0,1,2 to 0,1,3");
  EXPECT_EQ(summary({"--seq-length", "8191", "--max-position-embeddings", "16384"}),
            "564: tp 1,2,4,8 cp 1 pp 1,2,4 vpp 1,2 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 recompute "
            "0,1,2 sharding 0,1,2 to 0,1");
  EXPECT_EQ(summary({"--seq-length", "8192", "--max-position-embeddings", "16384"}),
            "1032: tp 1,2,4,8 cp 1,2 pp 1,2,4 vpp 1,2 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 recompute "
            "0,1,2 sharding 0,1,2 to 0,1");
  EXPECT_EQ(summary({"--seq-length", "16384", "--max-position-embeddings", "16384",
                     "--micro-batch-size", "4"}),
            "444: tp 1,2,4,8 cp 1,2,4 pp 1,2,4 vpp 1,2 ep 1,2,4,8 etp 1,2,4,8 mbs 4 recompute "
            "0,1,2 sharding 0,1,2 to 0,1");
  EXPECT_EQ(summary({"--num-layers", "64", "--gpus", "64xh100"}),
            "2964: tp 1,2,4,8 cp 1 pp 1,2,4,8,16,32 vpp 1,2,4,8 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 "
            "recompute 0,1,2 sharding 0,1,2 to 0,1,3");
  EXPECT_EQ(summary({"--model", "qwen3-30b-a3b", "--gpus", "32xh100"}),
            "2766: tp 1,2,4,8 cp 1 pp 1,2,4,8,16,32 vpp 1,2,4,8 ep 1,2,4,8,16,32 etp 1,2,4,8 mbs "
            "1,2,4 recompute 0,1,2 sharding 0,1,2 to 0,1,3");
}

TEST_F(ChoicesOfLayouts, LeaveWhatAUserHasSaid) {
  EXPECT_EQ(summary({"--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"}),
            "99: tp 2 cp 1 pp 1,2,4 vpp 1,2 ep 1,2,4 etp 2 mbs 1,2,4 recompute 0,1,2 sharding "
            "0,1,2 to 0,1");
  EXPECT_EQ(summary({"--context-parallel-size", "2", "--pipeline-model-parallel-size", "4"}),
            "18: tp 1 cp 2 pp 4 vpp 1 ep 1,2 etp 1 mbs 1,2,4 recompute 0,1,2 sharding 1 to 0,1");
  EXPECT_EQ(summary({"--expert-model-parallel-size", "4", "--moe-token-dispatcher-type", "flex"}),
            "135: tp 1,2,4,8 cp 1 pp 1,2 vpp 1,2 ep 4 etp 1,2 mbs 1,2,4 recompute 0,1,2 sharding "
            "0,1,2 to 2");
  EXPECT_EQ(summary({"--micro-batch-size", "8"}),
            "204: tp 1,2,4,8 cp 1 pp 1,2,4 vpp 1,2 ep 1,2,4,8 etp 1,2,4,8 mbs 8 recompute 0,1,2 "
            "sharding 0,1,2 to 0,1");
  EXPECT_EQ(summary({"--recompute-granularity", "selective"}),
            "204: tp 1,2,4,8 cp 1 pp 1,2,4 vpp 1,2 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 recompute 0 "
            "sharding 0,1,2 to 0,1");
  EXPECT_EQ(summary({"--use-distributed-optimizer"}),
            "459: tp 1,2,4,8 cp 1 pp 1,2,4 vpp 1,2 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 recompute "
            "0,1,2 sharding 0 to 0,1");
  EXPECT_EQ(summary({"--optimizer", "muon"}),
            "459: tp 1,2,4,8 cp 1 pp 1,2,4 vpp 1,2 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 recompute "
            "0,1,2 sharding 0 to 0,1");
  EXPECT_EQ(summary({"--decoder-first-pipeline-num-layers", "1"}),
            "504: tp 1,2,4,8 cp 1 pp 1,2,4 vpp 1 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 recompute 0,1,2 "
            "sharding 0,1,2 to 0,1");
  EXPECT_EQ(summary({"--account-for-loss-in-pipeline-split"}),
            "504: tp 1,2,4,8 cp 1 pp 1,2,4 vpp 1 ep 1,2,4,8 etp 1,2,4,8 mbs 1,2,4 recompute 0,1,2 "
            "sharding 0,1,2 to 0,1");
}

TEST_F(ChoicesOfLayouts, AreSaidByFlags) {
  use({});
  LayoutChoice choice;
  EXPECT_EQ(flags(choice),
            "tensor-model-parallel-size=1 context-parallel-size=1 pipeline-model-parallel-size=1 "
            "expert-model-parallel-size=1 expert-tensor-parallel-size=1 micro-batch-size=1");
  choice.tp = 2;
  choice.cp = 4;
  choice.pp = 3;
  choice.vpp = 2;
  choice.ep = 8;
  choice.etp = 5;
  choice.micro_batch = 6;
  EXPECT_EQ(flags(choice),
            "tensor-model-parallel-size=2 context-parallel-size=4 pipeline-model-parallel-size=3 "
            "num-virtual-stages-per-pipeline-rank=2 expert-model-parallel-size=8 "
            "expert-tensor-parallel-size=5 moe-token-dispatcher-type=allgather micro-batch-size=6");
  EXPECT_EQ(text_of_sizes(choice), "TP2 CP4 PP3x2 EP8 ETP5");
  EXPECT_EQ(text_of_sizes({}), "DP alone");
  EXPECT_EQ(text_of_sizes(experts_over(2, 1)), "EP2");
  choice.stages = "Et|tL";
  choice.recompute = RecomputeChoice::cheap;
  choice.sharding = ShardingChoice::optimizer;
  choice.dispatcher = TokenDispatcher::hierarchical;
  choice.schedule = PipelineSchedule::zb_h1;
  choice.overlap_gradients = choice.overlap_experts = true;
  EXPECT_EQ(flags(choice),
            "tensor-model-parallel-size=2 context-parallel-size=4 pipeline-model-parallel-size=3 "
            "pipeline-model-parallel-layout=Et|tL expert-model-parallel-size=8 "
            "expert-tensor-parallel-size=5 moe-token-dispatcher-type=hierarchical "
            "moe-dispatch-ranks-per-node=8 micro-batch-size=6 recompute-granularity=selective "
            "recompute-modules=layernorm recompute-modules=moe_act use-distributed-optimizer=true "
            "pipeline-schedule=zb-h1 overlap-grad-reduce=true overlap-param-gather=true "
            "overlap-moe-expert-parallel-comm=true");
  choice = experts_over(1, 2);
  choice.recompute = RecomputeChoice::full;
  choice.sharding = ShardingChoice::all;
  choice.delay_weights = choice.overlap_shared_expert = true;
  EXPECT_EQ(flags(choice),
            "tensor-model-parallel-size=1 context-parallel-size=1 pipeline-model-parallel-size=1 "
            "expert-model-parallel-size=1 expert-tensor-parallel-size=2 "
            "moe-token-dispatcher-type=allgather micro-batch-size=1 recompute-granularity=full "
            "recompute-method=uniform recompute-num-layers=1 use-megatron-fsdp=true "
            "delay-wgrad-compute=true moe-shared-expert-overlap=true");
  choice = {};
  choice.overlap_gradients = true;
  EXPECT_EQ(flags(choice),
            "tensor-model-parallel-size=1 context-parallel-size=1 pipeline-model-parallel-size=1 "
            "expert-model-parallel-size=1 expert-tensor-parallel-size=1 micro-batch-size=1 "
            "overlap-grad-reduce=true");
  use({"--model", "deepseek-v3", "--gpus", "64xh100", "--recompute-granularity", "full",
       "--recompute-method", "uniform", "--recompute-num-layers", "1",
       "--use-distributed-optimizer", "--num-virtual-stages-per-pipeline-rank", "2",
       "--pipeline-model-parallel-size", "2"});
  choice.vpp = 3;
  choice.stages = "Et|tL";
  choice.recompute = RecomputeChoice::full;
  choice.sharding = ShardingChoice::all;
  EXPECT_EQ(flags(choice),
            "tensor-model-parallel-size=1 context-parallel-size=1 expert-model-parallel-size=1 "
            "expert-tensor-parallel-size=1 micro-batch-size=1 overlap-grad-reduce=true "
            "overlap-param-gather=true")
      << "what a user has said is not said again";
  use({"--model", "deepseek-v3", "--gpus", "64xh100"});
  choice = {};
  choice.recompute = RecomputeChoice::cheap;
  EXPECT_EQ(flags(choice),
            "tensor-model-parallel-size=1 context-parallel-size=1 pipeline-model-parallel-size=1 "
            "expert-model-parallel-size=1 expert-tensor-parallel-size=1 micro-batch-size=1 "
            "recompute-granularity=selective recompute-modules=layernorm recompute-modules=moe_act "
            "recompute-modules=mla_up_proj");
}

// Each flag of the stages by itself leaves none of them to the search.
TEST_F(ChoicesOfLayouts, FreedomEndsWithAnyFlagOfTheSubject) {
  const auto free = [&](std::vector<std::string> more) {
    use({});
    for (const std::string& name : more) options_.given.push_back(find_option(name)->name);
    return fmt::format("{:d}{:d}{:d}", space().stages_are_free(), space().sharding_is_free(),
                       space().recompute_is_free());
  };
  EXPECT_EQ(free({}), "111");
  for (const char* const name :
       {"num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage",
        "pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split"}) {
    EXPECT_EQ(free({name}), "011") << name;
  }
  for (const char* const name :
       {"use-distributed-optimizer", "use-megatron-fsdp", "data-parallel-sharding-strategy"}) {
    EXPECT_EQ(free({name}), "101") << name;
  }
  use({});
  options_.moe_layer_recompute = true;
  EXPECT_FALSE(space().recompute_is_free());
  use({});
  options_.checkpoint_activations = true;
  EXPECT_FALSE(space().recompute_is_free());
  use({});
  options_.recompute_modules = {"layernorm"};
  EXPECT_FALSE(space().recompute_is_free());
}

// Tokens go in two steps, across nodes and within them, where the experts' ranks fill nodes.
TEST_F(ChoicesOfLayouts, HierarchicalWhereNodesAreFilled) {
  use({"--model", "qwen3-30b-a3b", "--gpus", "32xh100"});
  const auto sizes_of = [&] {
    std::set<std::string> sizes;
    for (const LayoutChoice& choice : space().enumerate()) {
      if (choice.dispatcher == TokenDispatcher::hierarchical) {
        sizes.insert(fmt::format("{}x{}", choice.ep, choice.etp));
      }
    }
    return fmt::format("{}", fmt::join(sizes, " "));
  };
  EXPECT_EQ(sizes_of(), "16x1 16x2 2x8 32x1 4x4 4x8 8x2 8x4");
  gpus_per_nvlink_ = 1;
  EXPECT_EQ(sizes_of(), "") << "no node has two";
  gpus_per_nvlink_ = 8;
  options_.given.emplace_back("rank-order");
  EXPECT_EQ(sizes_of(), "") << "ranks may stand elsewhere";
}

}  // namespace
}  // namespace troupe
