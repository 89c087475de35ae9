// The optimizer Muon in layouts that leave matrices whole, and what it updates how.
#include <gtest/gtest.h>

#include "model/model_state.h"
#include "model/parameters.h"
#include "optimizer/muon_optimizer.h"
#include "support/layout_models.h"
#include "support/layout_run.h"
#include "support/named_parameter.h"

namespace troupe::testing {
namespace {

LayoutCase muon_case(const std::string& name) {
  LayoutCase c;
  c.name = name;
  c.model = moe_model(2);
  c.model.moe_shared_expert_intermediate_size = 28;
  c.model.moe_layers[0] = false;
  c.model.ffn_hidden_size = 40;
  c.micro_batches = 2;
  c.optimizer = std::make_shared<const MuonOptimizer>(MuonOptions{.nesterov = true});
  return c;
}

TEST(Muon, LayoutsEqualOneRank) {
  LayoutCase experts = muon_case("ep2_dp2");
  experts.layout.world_size = 4;
  experts.layout.expert_parallel = 2;
  LayoutCase pipeline = muon_case("pp2_cp2");
  pipeline.layout.world_size = 4;
  pipeline.layout.pipeline_parallel = 2;
  pipeline.layout.context_parallel = 2;
  for (const LayoutCase& c : {experts, pipeline}) {
    SCOPED_TRACE(c.name);
    expect_same_outcome(run_one_rank(c), run_layout(c));
  }
}

TEST(Muon, MatricesOfLayersHaveAMomentumAndAllElseTwoMoments) {
  const LayoutCase c = muon_case("one");
  const ModelState state = declare_model_state(c.model, DType::bf16, /*trained=*/true,
                                               {.run = run_layout_of(c), .rank = 0});
  for (const Parameter& parameter : state.parameters) {
    const bool is_moved = parameter.layer >= 0 && parameter.whole_shape.rank() >= 2;
    ASSERT_EQ(parameter.optimizer.size(), is_moved ? 1U : 2U) << parameter.full_name();
    EXPECT_EQ(parameter.optimizer.front().name, is_moved ? "momentum" : "exp_avg");
    EXPECT_EQ((*state.table)[parameter.optimizer.front().values].dtype, DType::f32);
  }
  const std::vector<int64_t> rows = {32, 16, 16};
  EXPECT_EQ(get_parameter(state, "w_qkv", 1).optimized.row_matrices, rows);
  EXPECT_TRUE(get_parameter(state, "w_gate_up", 1).optimized.row_matrices.empty());
}

}  // namespace
}  // namespace troupe::testing
