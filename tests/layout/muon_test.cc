// The optimizer Muon in layouts, those that cut matrices among them, and what it updates how.
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/model_state.h"
#include "model/parameters.h"
#include "ops/exchange/slices/slices.h"
#include "ops/optimizer/newton_schulz/newton_schulz.h"
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

LayoutCase in_layout(const std::string& name, LayoutOptions layout) {
  LayoutCase c = muon_case(name);
  layout.sequence_parallel = layout.tensor_parallel > 1;
  c.layout = layout;
  return c;
}

TEST(Muon, LayoutsEqualOneRank) {
  for (const LayoutCase& c :
       {in_layout("ep2_dp2", {.world_size = 4, .expert_parallel = 2}),
        in_layout("pp2_cp2", {.world_size = 4, .context_parallel = 2, .pipeline_parallel = 2}),
        in_layout("tp2", {.world_size = 2, .tensor_parallel = 2, .expert_tensor_parallel = 1}),
        in_layout("tp2_etp2", {.world_size = 4, .tensor_parallel = 2, .expert_tensor_parallel = 2}),
        in_layout("etp2", {.world_size = 2, .expert_tensor_parallel = 2}),
        in_layout("tp2_ep2", {.world_size = 4,
                             .tensor_parallel = 2,
                             .expert_parallel = 2,
                             .expert_tensor_parallel = 1}),
        in_layout("tp2_pp2", {.world_size = 4, .tensor_parallel = 2, .pipeline_parallel = 2}),
        in_layout("tp2_cp2", {.world_size = 4, .tensor_parallel = 2, .context_parallel = 2}),
        // More ranks than heads of keys and values, which two ranks then share.
        in_layout("tp4", {.world_size = 4, .tensor_parallel = 4, .key_value_heads = 2})}) {
    SCOPED_TRACE(c.name);
    expect_same_outcome(run_one_rank(c), run_layout(c));
  }
}

// Those of the experts have two dimensions, and are no matrices.
TEST(Muon, BiasesAreUpdatedByAdamW) {
  LayoutCase c = in_layout(
      "tp2_ep2",
      {.world_size = 4, .tensor_parallel = 2, .expert_parallel = 2, .expert_tensor_parallel = 1});
  c.model.add_bias_linear = true;
  const Outcome one = run_one_rank(c);
  EXPECT_TRUE(one.contains("after it, exp_avg of layers.1.b_gate_up"));
  expect_same_outcome(one, run_layout(c));
}

TEST(Muon, QueriesKeysAndValuesOfSlicesMayBeOneMatrix) {
  LayoutCase c = in_layout("tp2", {.world_size = 2, .tensor_parallel = 2});
  c.optimizer = std::make_shared<const MuonOptimizer>(MuonOptions{.split_rows = false});
  expect_same_outcome(run_one_rank(c), run_layout(c));
}

LayoutCase spread(const std::string& name, LayoutOptions layout) {
  LayoutCase c = in_layout(name, std::move(layout));
  c.sharding = StateSharding::optimizer;
  return c;
}

std::vector<LayoutCase> spread_cases() {
  LayoutCase many = spread("layers", {.world_size = 2});  // more matrices than one collective takes
  many.model = moe_model(8);
  many.gradient_bucket_elements = int64_t{1} << 40;
  LayoutCase early = spread("early", {.world_size = 4, .expert_parallel = 2});
  early.early_collectives = true;
  return {
      spread("dp4", {.world_size = 4}),
      spread("ep2_dp4", {.world_size = 4, .expert_parallel = 2}),
      spread("pp2_dp2", {.world_size = 4, .pipeline_parallel = 2}),
      spread("cp2_dp2", {.world_size = 4, .context_parallel = 2}),
      spread("tp2_dp2", {.world_size = 4, .tensor_parallel = 2, .expert_tensor_parallel = 1}),
      spread("tp2_etp2_dp2", {.world_size = 4, .tensor_parallel = 2, .expert_tensor_parallel = 2}),
      spread("two_instances", {.world_size = 4, .optimizer_instances = 2}),
      many,
      early};
}

TEST(DistMuon, LayoutsEqualOneRank) {
  for (const LayoutCase& c : spread_cases()) {
    SCOPED_TRACE(c.name);
    expect_same_outcome(run_one_rank(c), run_layout(c));
  }
}

// Each matrix has one owner among the ranks that hold the same slice of it, and costs are balanced;
// all else is cut by rows.
TEST(DistMuon, MatricesAreOwnedByOneRankEach) {
  for (const LayoutCase& c : spread_cases()) {
    SCOPED_TRACE(c.name);
    const auto run = run_layout_of(c);
    for (int32_t rank = 0; rank < run->layout.world_size(); ++rank) {
      const ModelPart part{.run = run, .rank = rank};
      for (const Parameter& parameter :
           declare_model_state(c.model, DType::bf16, /*trained=*/true, part).parameters) {
        const bool is_matrix = parameter.layer >= 0 && parameter.whole_shape.rank() >= 2;
        const Shard shard = part.shard(parameter.gradient_class);
        ASSERT_EQ(parameter.owner >= 0, is_matrix) << parameter.full_name();
        if (!is_matrix) continue;
        ASSERT_LT(parameter.owner, shard.count);
        const bool owns = parameter.owner == shard.place;
        EXPECT_EQ(parameter.shard.end, owns ? parameter.slice.elements() : 0);
        EXPECT_EQ(parameter.optimizer.size(), owns ? 1U : 0U);
        EXPECT_EQ(parameter.master.valid(), owns);
      }
    }
  }
}

TEST(DistMuon, CostsAreBalanced) {
  LayoutCase c = spread("dp4", {.world_size = 4});
  c.model = moe_model(8);
  const auto run = run_layout_of(c);
  std::map<int32_t, double> costs;
  const ModelState state =
      declare_model_state(c.model, DType::f32, /*trained=*/true, {.run = run, .rank = 0});
  for (const Parameter& parameter : state.parameters) {
    if (parameter.owner < 0) continue;
    OptimizedParameter what;
    what.whole_shape = parameter.whole_shape;
    what.is_hidden_matrix = true;
    costs[parameter.owner] += run->optimizer->cost_of_whole(what);
  }
  ASSERT_EQ(costs.size(), 4U);
  for (const auto& [owner, cost] : costs) {
    // 16 tensors of experts are nearly all of it: each of four ranks has four of them.
    EXPECT_NEAR(cost / costs[0], 1, 0.05) << owner;
  }
}

// Only the formula of slices is another one: their momentum after a step is that of one rank.
TEST(Muon, BlocksAreOrthogonalisedWithoutAnExchange) {
  LayoutCase c = in_layout("tp2", {.world_size = 2, .tensor_parallel = 2});
  c.optimizer = std::make_shared<const MuonOptimizer>(MuonOptions{.is_blockwise = true});
  const auto program = program_of(c, 0);
  int32_t orthogonalised = 0;
  for (int32_t i = 0; i < program->op_count(); ++i) {
    const OpSpec* spec = program->op(i).spec;
    EXPECT_NE(spec, &kJoinSlices);
    if (spec != &kNewtonSchulz) continue;
    const auto& attributes = program->op(i).attributes.as<NewtonSchulzAttributes>();
    if (attributes.sections[2].rows > 0) {
      ++orthogonalised;
      EXPECT_EQ(attributes.sections[0].rows, 16);
      EXPECT_EQ(attributes.sections[1].rows, 8);
      EXPECT_EQ(attributes.sections[2].rows, 8);
    }
  }
  EXPECT_EQ(orthogonalised, 2);
  run_layout(c);  // replicas keep the same bits
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
