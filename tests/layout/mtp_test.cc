// Multi-token prediction in every layout is that of one rank: its losses, their gradients, and what
// training makes of both.
#include <algorithm>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

ModelConfig with_mtp(ModelConfig config, int32_t layers) {
  config.mtp_num_layers = layers;
  config.mtp_loss_scaling_factor = 0.7;
  return config;
}

ModelConfig with_repeated_mtp(ModelConfig config, int32_t depths) {
  config = with_mtp(std::move(config), depths);
  config.mtp_use_repeated_layer = true;
  return config;
}

// Dense ones with one table for embedding and head, or two; experts with losses of their own, and
// with a bias that their loads move; and layers that serve several depths.
std::vector<NamedModel> models() {
  ModelConfig tied = dense_model(4);
  ModelConfig dropout = dense_model(4);
  dropout.tie_embeddings = false;
  dropout.normalization = Normalization::layer_norm;
  dropout.hidden_dropout = dropout.attention_dropout = 0.2;
  ModelConfig experts = auxiliary_loss_models(moe_model(4)).front().config;
  ModelConfig biased = auxiliary_loss_models(moe_model(4)).back().config;
  biased.tie_embeddings = true;
  return {{"tied", with_mtp(tied, 2)},
          {"dropout", with_mtp(dropout, 1)},
          {"experts", with_mtp(experts, 1)},
          {"biased", with_mtp(biased, 2)},
          {"repeated_dropout", with_repeated_mtp(dropout, 2)},
          {"repeated_experts", with_repeated_mtp(experts, 2)},
          {"repeated_biased", with_repeated_mtp(biased, 3)}};
}

// The layouts of one model.
class Cases {
 public:
  Cases(std::vector<LayoutCase>& all, const NamedModel& model) : all_(all), model_(model) {}

  template <class Configure>
  void add(const std::string& name, int32_t ranks, const Configure& configure) {
    const bool has_experts = model_.config.num_experts > 0;
    LayoutCase c;
    c.name = model_.name + "_" + name;
    c.model = model_.config;
    c.layout.world_size = ranks;
    c.micro_batch_size = 2;
    c.micro_batches = 4;
    c.sequence = 16;
    configure(c);
    c.layout.sequence_parallel |= has_experts;
    if (has_experts) c.layout.expert_tensor_parallel = 1;
    all_.push_back(c);
  }

  void pipeline(const std::string& name, int32_t ranks, PipelineSchedule schedule, int32_t chunks,
                const std::string& stages) {
    add(name, ranks, [&](LayoutCase& c) {
      c.layout.pipeline_parallel = ranks;
      c.schedule = schedule;
      c.chunks = chunks;
      c.stages = stages;
      if (chunks > 1) c.micro_batches = 2 * ranks;
    });
  }

 private:
  std::vector<LayoutCase>& all_;
  const NamedModel& model_;
};

std::vector<LayoutCase> cases() {
  using enum PipelineSchedule;
  std::vector<LayoutCase> all;
  for (const NamedModel& model : models()) {
    const bool has_experts = model.config.num_experts > 0;
    const std::string m(static_cast<size_t>(model.config.mtp_num_layers), 'm');
    Cases of_model(all, model);
    const auto add = [&](const std::string& name, int32_t ranks, const auto& configure) {
      of_model.add(name, ranks, configure);
    };
    const auto pipeline = [&](const std::string& name, int32_t ranks, PipelineSchedule schedule,
                              int32_t chunks, const std::string& stages) {
      of_model.pipeline(name, ranks, schedule, chunks, stages);
    };
    add("dp2", 2, [](LayoutCase&) {});
    add("tp2", 2, [](LayoutCase& c) { c.layout.tensor_parallel = 2; });
    add("tp2_sp_cp2", 4, [](LayoutCase& c) {
      c.layout.tensor_parallel = c.layout.context_parallel = 2;
      c.layout.sequence_parallel = true;
    });
    add("cp2_documents", 2, [](LayoutCase& c) {
      c.layout.context_parallel = 2;
      c.reset_attention_mask = true;
    });
    add("cp4_per_token", 4, [](LayoutCase& c) {
      c.layout.context_parallel = 4;
      c.context_exchange = ContextExchange::allgather;
      c.per_token_loss = true;
    });
    add("dp2_optimizer_chunks", 2, [](LayoutCase& c) {
      c.sharding = StateSharding::optimizer;
      c.early_collectives = true;
      c.loss_chunk_tokens = 10;
    });
    add("fsdp2_chunks", 2, [](LayoutCase& c) {
      c.sharding = StateSharding::parameters;
      c.loss_chunk_tokens = 12;
    });
    add("fsdp2_tp2_full", 4, [](LayoutCase& c) {
      c.layout.tensor_parallel = 2;
      c.layout.sequence_parallel = true;
      c.sharding = StateSharding::parameters;
      c.early_collectives = true;
      c.recompute = {.granularity = RecomputeOptions::Granularity::full, .layers = 2};
    });
    pipeline("pp2", 2, one_f_one_b, 1, "");
    pipeline("pp2_interleaved", 2, one_f_one_b, 2, "");
    pipeline("pp2_mtp_with_layers", 2, one_f_one_b, 1, "Ett|tt" + m + "L");
    pipeline("pp3_mtp_before_loss", 3, one_f_one_b, 1, "Ett|tt" + m + "|L");
    pipeline("pp4_mtp_alone", 4, one_f_one_b, 1, "Ett|tt|" + m + "|L");
    pipeline("pp4_mtp_far_from_loss", 4, one_f_one_b, 1, "Etttt|" + m + "||L");
    pipeline("pp3_interleaved_alone", 3, one_f_one_b, 2, "Et|t|t|t|" + m + "|L");
    pipeline("pp2_zb_h1", 2, zb_h1, 1, "");
    pipeline("pp4_zb_h1_alone", 4, zb_h1, 1, "Ett|tt|" + m + "|L");
    pipeline("pp2_zb_v", 2, zb_v, 2, "");
    pipeline("pp2_zb_v_alone", 2, zb_v, 2, "Et|ttt|" + m + "|L");
    add("pp3_tp2_cp2_recompute", 12, [&](LayoutCase& c) {
      c.layout.pipeline_parallel = 3;
      c.layout.tensor_parallel = c.layout.context_parallel = 2;
      c.layout.sequence_parallel = true;
      c.stages = "Ett|tt" + m + "|L";
      c.reset_attention_mask = true;
      c.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                     .modules = {&kCoreAttentionModule, &kNormModule}};
    });
    if (!has_experts) continue;
    add("ep2_alltoall", 2, [](LayoutCase& c) {
      c.layout.expert_parallel = 2;
      c.dispatcher = TokenDispatcher::alltoall;
      c.ignore_padding = true;
      c.per_token_loss = true;
    });
    add("ep2_pp2_merged", 4, [](LayoutCase& c) {
      c.layout.expert_parallel = c.layout.pipeline_parallel = 2;
      c.dispatcher = TokenDispatcher::alltoall;
      c.chunks = 2;
      c.merged = true;
      c.overlap = {.delay_weight_gradients = true};
    });
  }
  return all;
}

// Layers of several depths in several stages.
std::vector<NamedModel> deep_models() {
  std::vector<NamedModel> all;
  for (NamedModel& model : models()) {
    if (model.config.mtp_use_repeated_layer) continue;
    const bool is_tied = model.config.tie_embeddings;
    model.config.mtp_num_layers = is_tied ? 2 : 3;
    all.push_back(std::move(model));
  }
  return all;
}

std::vector<LayoutCase> spread_cases() {
  using enum PipelineSchedule;
  std::vector<LayoutCase> all;
  for (const NamedModel& model : deep_models()) {
    const bool has_experts = model.config.num_experts > 0;
    const std::string more(static_cast<size_t>(model.config.mtp_num_layers) - 1, 'm');
    const std::string middle = more.substr(1);  // of three layers the second
    Cases of_model(all, model);
    of_model.pipeline("pp2_spread", 2, one_f_one_b, 1, "Ettttm|" + more + "L");
    of_model.pipeline("pp3_spread_everywhere", 3, one_f_one_b, 1, "Ettttm|" + middle + "|mL");
    of_model.pipeline("pp4_spread_with_gap", 4, one_f_one_b, 1, "Ettttm||" + more + "|L");
    of_model.pipeline("pp2_last_chunk_of_first_rank", 2, one_f_one_b, 2, "Ett|tt|m" + more + "|L");
    of_model.pipeline("pp2_spread_interleaved", 2, one_f_one_b, 2, "Ett|ttm|" + middle + "|mL");
    of_model.pipeline("pp3_spread_interleaved", 3, one_f_one_b, 2, "Ettt|t|m|" + middle + "|m|L");
    of_model.pipeline("pp3_spread_zb_h1", 3, zb_h1, 1, "Ettttm|" + middle + "|mL");
    of_model.pipeline("pp4_spread_zb_h1", 4, zb_h1, 1, "Ett|ttm|" + more + "|L");
    of_model.pipeline("pp2_spread_zb_v", 2, zb_v, 2, "Ettttm|" + middle + "|m|L");
    of_model.add("pp3_tp2_cp2_spread_recompute", 12, [&](LayoutCase& c) {
      c.layout.pipeline_parallel = 3;
      c.layout.tensor_parallel = c.layout.context_parallel = 2;
      c.layout.sequence_parallel = true;
      c.stages = "Ettt|tm|" + more + "L";
      c.reset_attention_mask = true;
      c.recompute = {.granularity = RecomputeOptions::Granularity::full, .layers = 1};
    });
    of_model.add("pp2_cp2_spread_selective", 4, [&](LayoutCase& c) {
      c.layout.pipeline_parallel = c.layout.context_parallel = 2;
      c.stages = "Ettttm|" + more + "L";
      c.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                     .modules = {&kCoreAttentionModule, &kNormModule}};
    });
    of_model.add("pp2_fsdp2_spread", 4, [&](LayoutCase& c) {
      c.layout.pipeline_parallel = 2;
      c.stages = "Ett|ttm|" + more + "|L";
      c.sharding = StateSharding::parameters;
      c.early_collectives = true;
      c.loss_chunk_tokens = 12;
    });
    of_model.add("pp2_dp2_optimizer_spread_per_token", 4, [&](LayoutCase& c) {
      c.layout.pipeline_parallel = 2;
      c.stages = "Ettttm|" + more + "L";
      c.sharding = StateSharding::optimizer;
      c.gradient_bucket_elements = 5000;
      c.per_token_loss = true;
      c.reset_attention_mask = true;
    });
    if (!has_experts) continue;
    of_model.add("pp2_ep2_spread_alltoall", 4, [&](LayoutCase& c) {
      c.layout.expert_parallel = c.layout.pipeline_parallel = 2;
      c.stages = "Ettttm|" + more + "L";
      c.dispatcher = TokenDispatcher::alltoall;
      c.ignore_padding = true;
      c.per_token_loss = true;
    });
    of_model.add("pp2_ep2_spread_merged", 4, [&](LayoutCase& c) {
      c.layout.expert_parallel = c.layout.pipeline_parallel = 2;
      c.stages = "Ett|tt|m" + middle + "|mL";
      c.chunks = 2;
      c.dispatcher = TokenDispatcher::alltoall;
      c.merged = true;
      c.overlap = {.delay_weight_gradients = true};
    });
  }
  for (const NamedModel& model : models()) {
    if (!model.config.mtp_use_repeated_layer) continue;
    const std::string more(static_cast<size_t>(model.config.mtp_num_layers) - 1, 'm');
    Cases of_model(all, model);
    of_model.pipeline("pp2_two_stages_of_one_rank", 2, one_f_one_b, 2, "Ett|ttm||" + more + "L");
    of_model.pipeline("pp2_zb_v_two_stages_of_one_rank", 2, zb_v, 2, "Ett|ttm|" + more + "|L");
    of_model.add("pp2_fsdp2_two_stages_of_one_rank", 4, [&](LayoutCase& c) {
      c.layout.pipeline_parallel = 2;
      c.stages = "Ettttm||" + more + "|L";
      c.sharding = StateSharding::parameters;
    });
  }
  return all;
}

class MtpLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(MtpLayout, EqualsOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Layouts, MtpLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Spread, MtpLayout, ::testing::ValuesIn(spread_cases()),
                         [](const auto& info) { return info.param.name; });

// The comparison above would hold as well if shifting ignored documents, or weights did.
TEST(Mtp, DocumentsAndWeightsMatter) {
  LayoutCase c = cases().front();
  const Outcome plain = run_one_rank(c);
  c.model.mtp_loss_scaling_factor = 0.1;
  const Outcome lighter = run_one_rank(c);
  EXPECT_EQ(lighter.at("step 1 mtp loss 1"), plain.at("step 1 mtp loss 1"));
  EXPECT_NE(lighter.at("step 1 grad_norm"), plain.at("step 1 grad_norm"));
  c.reset_attention_mask = true;
  EXPECT_NE(run_one_rank(c).at("step 1 mtp loss 2"), plain.at("step 1 mtp loss 2"));
}

// Also that of the last layer, after which nothing is declared. A layer that serves all depths has
// one, which goes by the loads of all.
TEST(Mtp, LoadsMoveTheBiasOfEachExpert) {
  for (const char* name : {"biased_dp2", "repeated_biased_dp2"}) {
    SCOPED_TRACE(name);
    const std::vector<LayoutCase> all = cases();
    const auto biased = std::find_if(all.begin(), all.end(),
                                     [&](const LayoutCase& each) { return each.name == name; });
    ASSERT_NE(biased, all.end());
    const ModelConfig& model = biased->model;
    const Outcome outcome = run_one_rank(*biased);
    for (int32_t layer = 0; layer < model.all_layers(); ++layer) {
      const std::string at = "layers." + std::to_string(layer) + ".";
      const auto bias = outcome.find("after it " + at + "expert_bias");
      ASSERT_EQ(bias != outcome.end(), model.is_owner(layer)) << layer;
      if (!model.is_owner(layer)) continue;
      EXPECT_NE(bias->second, std::vector<double>(bias->second.size())) << layer;
      double rows = 0;
      const std::string counts = "step 1 layer " + std::to_string(layer) + " expert counts";
      for (const double count : outcome.at(counts)) rows += count;
      const int64_t tokens = int64_t{biased->micro_batch_size} * biased->micro_batches *
                             biased->layout.world_size * biased->sequence;
      EXPECT_EQ(rows, static_cast<double>(model.uses_of(layer) * tokens * model.moe_router_topk))
          << layer;
    }
  }
}

// Memory that is used again, and the timing of ranks, leave no trace: the same bits.
TEST(Mtp, PlannedRunsEqualTheOracle) {
  for (const LayoutCase& c : cases()) {
    if (!c.name.ends_with("_alone")) continue;
    SCOPED_TRACE(c.name);
    expect_same_bits(run_layout(c), run_layout(c, {.oracle = true}));
  }
  for (const LayoutCase& c : spread_cases()) {
    if (!c.name.ends_with("_interleaved") && !c.name.ends_with("_zb_v")) continue;
    SCOPED_TRACE(c.name);
    expect_same_bits(run_layout(c), run_layout(c, {.oracle = true}));
  }
}

}  // namespace
}  // namespace troupe::testing
