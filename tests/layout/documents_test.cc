// With attention within documents, every layout computes what one rank computes.
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "model/blocks/gqa_attention.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

std::vector<NamedModel> models() {
  ModelConfig dense = dense_model(2);
  dense.num_query_groups = 4;
  ModelConfig window = dense;
  window.sliding_window = 3;
  window.attention_dropout = 0.2;
  ModelConfig experts = auxiliary_loss_models(moe_model(2)).back().config;
  experts.num_query_groups = 4;
  return {{"dense", dense}, {"window", window}, {"experts", experts}, delta_net_model(dense)};
}

void add_context_parallel(const NamedModel& model, std::vector<LayoutCase>& all) {
  for (const ContextExchange exchange :
       {ContextExchange::p2p, ContextExchange::a2a, ContextExchange::allgather}) {
    for (const int32_t cp : {2, 4}) {
      for (const int32_t tp : {1, 2}) {
        if (exchange == ContextExchange::a2a && cp * tp > 4) continue;  // of four groups of heads
        LayoutCase c;
        c.name = std::string(name_of(exchange)) + "_cp" + std::to_string(cp) + "_tp" +
                 std::to_string(tp);
        c.layout.world_size = cp * tp;
        c.layout.context_parallel = cp;
        c.layout.tensor_parallel = tp;
        c.layout.sequence_parallel = tp > 1;
        c.context_exchange = exchange;
        c.model = model.config;
        all.push_back(c);
      }
    }
  }
}

// Gated delta nets whose key heads the ranks of cp cannot share: states pass.
std::vector<LayoutCase> passing_cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](int32_t key_heads, int32_t cp, int32_t tp, int32_t pp) {
    LayoutCase c;
    const NamedModel model = delta_net_model(dense_model(2), key_heads);
    c.name = model.name + "_cp" + std::to_string(cp) + "_tp" + std::to_string(tp) + "_pp" +
             std::to_string(pp);
    c.model = model.config;
    c.layout.world_size = cp * tp * pp;
    c.layout.context_parallel = cp;
    c.layout.tensor_parallel = tp;
    c.layout.sequence_parallel = tp > 1;
    c.layout.pipeline_parallel = pp;
    all.push_back(c);
  };
  add(1, 2, 1, 1);
  add(3, 4, 1, 1);
  add(2, 2, 2, 1);
  add(3, 2, 1, 2);
  all.back().recompute = {.granularity = RecomputeOptions::Granularity::selective,
                          .modules = {&kCoreAttentionModule}};
  add(3, 2, 1, 1);
  all.back().name += "_recompute";
  all.back().recompute = {.granularity = RecomputeOptions::Granularity::full};
  for (LayoutCase& c : all) {
    c.micro_batch_size = 2;
    c.micro_batches = 2;
    c.sequence = 16;
    c.reset_attention_mask = true;
  }
  return all;
}

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  for (const NamedModel& model : models()) {
    std::vector<LayoutCase> own;
    add_context_parallel(model, own);
    const auto add = [&](const std::string& name, int32_t ranks, const auto& configure) {
      LayoutCase c;
      c.name = name;
      c.model = model.config;
      c.layout.world_size = ranks;
      configure(c);
      own.push_back(c);
    };
    add("tp2", 2, [](LayoutCase& c) {
      c.layout.tensor_parallel = 2;
      c.layout.sequence_parallel = true;
    });
    add("dp2_recompute", 2, [](LayoutCase& c) {
      c.sharding = StateSharding::optimizer;
      c.recompute = {.granularity = RecomputeOptions::Granularity::full};
    });
    add("pp2", 2, [](LayoutCase& c) { c.layout.pipeline_parallel = 2; });
    add("pp2_cp2_selective", 4, [](LayoutCase& c) {
      c.layout.pipeline_parallel = 2;
      c.layout.context_parallel = 2;
      c.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                     .modules = {&kCoreAttentionModule}};
    });
    for (LayoutCase& c : own) {
      c.name = model.name + "_" + c.name;
      c.layout.expert_tensor_parallel = model.config.num_experts > 0 ? 1 : c.layout.tensor_parallel;
      c.micro_batch_size = 2;
      c.micro_batches = 2;
      c.sequence = 16;
      c.reset_attention_mask = true;
      all.push_back(c);
    }
  }
  for (const LayoutCase& c : passing_cases()) all.push_back(c);
  return all;
}

class DocumentsLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(DocumentsLayout, EqualsOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

// The comparison above would hold as well if documents were ignored.
TEST(Documents, ChangeTheLoss) {
  LayoutCase c = cases().front();
  const double within = run_one_rank(c).at("step 1 loss").front();
  c.reset_attention_mask = false;
  EXPECT_NE(run_one_rank(c).at("step 1 loss").front(), within);
}

INSTANTIATE_TEST_SUITE_P(Layouts, DocumentsLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
