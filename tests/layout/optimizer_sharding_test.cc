// The distributed optimizer computes what one rank computes, though each rank keeps moments and
// master weights of its shard only.
#include <gtest/gtest.h>

#include "model/parameters.h"
#include "program/test_models.h"
#include "support/adamw_state.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

// Norms, biases and tensors of a single row: shards of some are empty.
ModelConfig experts(bool tied) {
  ModelConfig config = moe_model(2);
  config.moe_aux_loss_coeff = 0.5;
  config.moe_z_loss_coeff = 0.1;
  config.moe_shared_expert_intermediate_size = 28;
  config.moe_shared_expert_gate = true;
  config.moe_layers[0] = false;  // first dense
  config.ffn_hidden_size = 40;
  config.tie_embeddings = tied;
  return config;
}

// All query heads share one head of keys and values, which all ranks of a tp group then hold: a
// shard has rows of it or not.
ModelConfig one_group(ModelConfig config) {
  config.num_query_groups = 1;
  return config;
}

struct Sizes {
  int32_t dp = 1;
  int32_t tp = 1;
  int32_t cp = 1;
  int32_t pp = 1;
  int32_t ep = 1;
  int32_t instances = 1;
};

LayoutCase make_case(const std::string& name, const ModelConfig& model, const Sizes& sizes) {
  LayoutCase each;
  each.name = name;
  each.model = model;
  each.layout.world_size = sizes.dp * sizes.tp * sizes.cp * sizes.pp;
  each.layout.tensor_parallel = sizes.tp;
  each.layout.context_parallel = sizes.cp;
  each.layout.pipeline_parallel = sizes.pp;
  each.layout.expert_parallel = sizes.ep;
  each.layout.expert_tensor_parallel = 1;
  each.layout.optimizer_instances = sizes.instances;
  each.layout.sequence_parallel = true;
  each.micro_batches = 2;
  each.sharding = StateSharding::optimizer;
  return each;
}

std::vector<LayoutCase> cases() {
  const ModelConfig untied = experts(false);
  const ModelConfig tied = experts(true);
  return {
      make_case("dp2", untied, {.dp = 2}),
      make_case("dp3_tied", tied, {.dp = 3}),
      make_case("dp4", untied, {.dp = 4}),
      make_case("dense_tp2_dp2", dense_model(2), {.dp = 2, .tp = 2}),
      make_case("tp2_dp2", untied, {.dp = 2, .tp = 2}),
      make_case("tp4_dp2_shared_heads", untied, {.dp = 2, .tp = 4}),
      make_case("dense_tp4_dp2_shared_heads", one_group(dense_model(3)), {.dp = 2, .tp = 4}),
      make_case("tp2_dp3_shared_heads", one_group(tied), {.dp = 3, .tp = 2}),
      make_case("ep2_edp2", untied, {.dp = 4, .ep = 2}),
      make_case("ep4_edp1", untied, {.dp = 4, .ep = 4}),
      make_case("pp2_dp2", untied, {.dp = 2, .pp = 2}),
      make_case("pp2_dp2_tied", tied, {.dp = 2, .pp = 2}),
      make_case("cp2_dp2", untied, {.dp = 2, .cp = 2}),
      make_case("dp4_2_instances", untied, {.dp = 4, .instances = 2}),
      make_case("dp2_2_instances", untied, {.dp = 2, .instances = 2}),
      make_case("ep2_edp2_2_instances", tied, {.dp = 4, .ep = 2, .instances = 2}),
      make_case("tp2_pp2_dp2_tied", tied, {.dp = 2, .tp = 2, .pp = 2}),
      make_case("tp2_cp2_dp2_ep2_2_instances", untied,
                {.dp = 2, .tp = 2, .cp = 2, .ep = 2, .instances = 2}),
  };
}

class OptimizerSharding : public ::testing::TestWithParam<LayoutCase> {};

// Sharding the optimizer state or everything, with collectives as early as they can be, too.
TEST_P(OptimizerSharding, ComputesWhatOneRankComputes) {
  LayoutCase layout = GetParam();
  const Outcome one = run_one_rank(layout);
  for (const StateSharding sharding : {StateSharding::optimizer, StateSharding::parameters}) {
    SCOPED_TRACE(sharding == StateSharding::parameters ? "parameters" : "optimizer");
    layout.sharding = sharding;
    layout.early_collectives = false;
    const Outcome sharded = run_layout(layout);
    expect_same_outcome(one, sharded);
    layout.early_collectives = true;
    layout.gradient_bucket_elements = 10'000;
    EXPECT_EQ(run_layout(layout), sharded) << "order changes no bit";
    // Each layer's sums then stand in the middle of the backward pass.
    layout.gradient_bucket_elements = 0;
    EXPECT_EQ(run_layout(layout), sharded) << "order changes no bit, layer by layer";
  }
}

int64_t bytes_of(const ModelState& state, Role role) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < state.table->size(); ++i) {
    const StateTensor& tensor = (*state.table)[StateId{i}];
    if (tensor.role != role) continue;
    bytes += tensor.shape.elements() * static_cast<int64_t>(size_of(tensor.dtype));
  }
  return bytes;
}

// With sharded parameters a rank holds of values and gradients no more than of moments.
TEST_P(OptimizerSharding, ShardsParametersAndGradientsAlike) {
  LayoutCase layout = GetParam();
  layout.sharding = StateSharding::parameters;
  const auto sharded = run_layout_of(layout);
  for (int32_t rank = 0; rank < sharded->layout.world_size(); ++rank) {
    const ModelState state =
        declare_model_state(layout.model, DType::f64, true, {.run = sharded, .rank = rank});
    const int64_t values = bytes_of(state, Role::parameter);
    EXPECT_EQ(bytes_of(state, Role::gradient), values);
    EXPECT_EQ(bytes_of(state, Role::optimizer), 2 * values);
  }
}

// Together the ranks of an instance keep the optimizer state once, and none much more than its
// part.
TEST_P(OptimizerSharding, KeepsEveryElementOnce) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    LayoutCase layout = GetParam();
    const auto sharded = run_layout_of(layout);
    layout.sharding = StateSharding::none;
    const auto whole = run_layout_of(layout);
    int64_t sum = 0;
    int64_t sum_of_whole = 0;
    for (int32_t rank = 0; rank < whole->layout.world_size(); ++rank) {
      const ModelPart part{.run = sharded, .rank = rank};
      const ModelState state = declare_model_state(layout.model, dtype, true, part);
      int64_t expected = 0;
      for (const Parameter& parameter : state.parameters) {
        const int64_t elements = parameter.slice.elements();
        const int64_t states = (*state.table)[parameter.value].dtype == DType::bf16 ? 3 : 2;
        expected += (parameter.shard.end - parameter.shard.begin) * states * 4;
        // At most a row more than an equal part.
        const int32_t shards = part.shard(parameter.gradient_class).count;
        const auto last = static_cast<int>(parameter.slice.ranges.size()) - 1;
        const int64_t row = last == 0 ? 1 : parameter.slice.extent(last);
        EXPECT_LT(parameter.shard.end - parameter.shard.begin, elements / shards + row + 1);
        EXPECT_EQ(exp_avg_of(parameter).values.valid(),
                  parameter.shard.end > parameter.shard.begin);
      }
      EXPECT_EQ(bytes_of(state, Role::optimizer), expected);
      sum += bytes_of(state, Role::optimizer);
      sum_of_whole +=
          bytes_of(declare_model_state(layout.model, dtype, true, {.run = whole, .rank = rank}),
                   Role::optimizer);
    }
    if (sharded->layout.options().optimizer_instances < sharded->layout.dp()) {
      EXPECT_LT(sum, sum_of_whole);
    }
    const int32_t replicas = whole->layout.dp() * whole->layout.cp();
    if (layout.model.num_experts == 0 || whole->layout.edp() == replicas) {
      EXPECT_EQ(sum * replicas / whole->layout.options().optimizer_instances, sum_of_whole);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, OptimizerSharding, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
