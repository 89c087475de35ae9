// With padding that the routers ignore, every layout computes what one rank computes: their losses,
// the expert bias, and the loads, which come from other numbers of valid tokens on every rank.
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  for (NamedModel& model : auxiliary_loss_models(moe_model(2))) {
    model.config.num_query_groups = 4;
    model.config.num_experts = 8;
    const auto add = [&](const std::string& name, int32_t ranks, const auto& configure) {
      LayoutCase c;
      c.name = model.name + "_" + name;
      c.model = model.config;
      c.layout.world_size = ranks;
      c.layout.expert_tensor_parallel = 1;
      c.layout.sequence_parallel = true;
      c.micro_batch_size = 2;
      c.micro_batches = 2;
      c.sequence = 16;
      c.ignore_padding = true;
      configure(c);
      all.push_back(c);
    };
    add("tp2", 2, [](LayoutCase& c) { c.layout.tensor_parallel = 2; });
    add("cp2", 2, [](LayoutCase& c) { c.layout.context_parallel = 2; });
    add("tp2_cp2_per_token", 4, [](LayoutCase& c) {
      c.layout.tensor_parallel = 2;
      c.layout.context_parallel = 2;
      c.per_token_loss = true;
    });
    add("dp2_ep2_mbs1", 2, [](LayoutCase& c) {
      c.layout.expert_parallel = 2;
      c.dispatcher = TokenDispatcher::alltoall;
      c.micro_batch_size = 1;
      c.micro_batches = 3;
    });
    add("dp2_per_token_recompute", 2, [](LayoutCase& c) {
      c.per_token_loss = true;
      c.sharding = StateSharding::optimizer;
      c.recompute = {.granularity = RecomputeOptions::Granularity::full};
    });
    add("pp2", 2, [](LayoutCase& c) { c.layout.pipeline_parallel = 2; });
    add("pp2_tp2_per_token", 4, [](LayoutCase& c) {
      c.layout.pipeline_parallel = 2;
      c.layout.tensor_parallel = 2;
      c.per_token_loss = true;
    });
    add("ep2_merged", 2, [](LayoutCase& c) {
      c.layout.expert_parallel = 2;
      c.dispatcher = TokenDispatcher::alltoall;
      c.merged = true;
      c.overlap = {.delay_weight_gradients = true, .shared_expert = true};
      c.micro_batches = 3;
    });
  }
  return all;
}

class PaddedLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(PaddedLayout, EqualsOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Layouts, PaddedLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
