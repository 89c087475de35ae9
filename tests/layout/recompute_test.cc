// Recompute changes when a value is computed and nothing else: with every module, with all of them,
// and with whole layers, a run leaves the bits that it leaves without, with dropout, jitter and
// every kind of loss, on one rank and in layouts of EP, TP, CP and PP, alone and with overlap. And
// it needs less memory.
#include "passes/recompute.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "model/blocks/dense_mlp.h"
#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "plan/print.h"
#include "program/golden.h"
#include "program/verify.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

using Granularity = RecomputeOptions::Granularity;
using Method = RecomputeOptions::Method;

struct Named {
  std::string name;
  RecomputeOptions options;
};

std::vector<Named> all_options() {
  std::vector<Named> all;
  const auto selective = [&](const std::string& name, const ModuleSet& modules) {
    all.push_back({name, {.granularity = Granularity::selective, .modules = modules}});
  };
  selective("core_attn", {&kCoreAttentionModule});
  selective("moe_act", {&kExpertActivationModule});
  selective("moe_permute", {&kExpertRowsModule});
  selective("layernorm", {&kNormModule});
  selective("mlp", {&kMlpModule});
  selective("moe", {&kMoeModule});
  selective("shared_experts", {&kSharedExpertModule});
  selective("all_modules", {&kCoreAttentionModule, &kExpertActivationModule, &kNormModule,
                            &kMlpModule, &kMoeModule, &kSharedExpertModule});
  selective("layernorm_moe_act_moe_permute",
            {&kExpertActivationModule, &kExpertRowsModule, &kNormModule});
  all.push_back({"full_uniform_1", {.granularity = Granularity::full}});
  all.push_back({"full_uniform_2", {.granularity = Granularity::full, .layers = 2}});
  all.push_back({"full_block_1", {.granularity = Granularity::full, .method = Method::block}});
  return all;
}

// Layers with experts and dense ones, a shared expert with a gate, dropout, jitter; `losses`: see
// auxiliary_loss_models().
ModelConfig moe_model_of(int32_t layers, size_t losses) {
  ModelConfig model = auxiliary_loss_models(moe_model(layers))[losses].config;
  model.num_query_groups = 4;
  model.num_experts = 8;
  model.moe_shared_expert_intermediate_size = 32;
  model.hidden_dropout = model.attention_dropout = 0.1;
  model.moe_input_jitter_eps = 0.01;
  return model;
}

ModelConfig dense_model_of(int32_t layers) {
  ModelConfig model = dense_model(layers);
  model.num_query_groups = 4;
  model.hidden_dropout = model.attention_dropout = 0.1;
  return model;
}

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const std::string& name, const ModelConfig& model, int32_t ranks,
                       const auto& configure) {
    LayoutCase c;
    c.name = name;
    c.model = model;
    c.layout.world_size = ranks;
    c.layout.expert_tensor_parallel = 1;
    c.layout.sequence_parallel = true;
    c.micro_batches = 2;
    c.sequence = 16;
    configure(c);
    all.push_back(c);
  };
  add("dense", dense_model_of(3), 1, [](LayoutCase&) {});
  add("dense_layer_norm_tp2_cp2", dense_model_of(2), 4, [](LayoutCase& c) {
    c.model.normalization = Normalization::layer_norm;
    c.layout.tensor_parallel = 2;
    c.layout.context_parallel = 2;
    c.layout.expert_tensor_parallel = 2;
    c.context_exchange = ContextExchange::a2a;
  });
  add("moe", moe_model_of(3, 1), 1, [](LayoutCase&) {});
  add("moe_biases", moe_model_of(2, 2), 1, [](LayoutCase& c) { c.model.add_bias_linear = true; });
  add("ep2_alltoall", moe_model_of(2, 2), 2, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::alltoall;
  });
  add("tp2_ep2_etp2_cp2", moe_model_of(2, 0), 4, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.context_parallel = 2;
    c.layout.expert_parallel = 2;
    c.layout.expert_tensor_parallel = 2;
    c.context_exchange = ContextExchange::allgather;
  });
  add("pp2_ep2_flex", moe_model_of(4, 2), 4, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::flex;
    c.micro_batches = 3;
  });
  add("pp2_zb_v", moe_model_of(4, 0), 2, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.schedule = PipelineSchedule::zb_v;
    c.chunks = 2;
  });
  add("ep2_sharded_parameters", moe_model_of(2, 0), 4, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.sharding = StateSharding::parameters;
    c.early_collectives = true;
    c.merged = true;
  });
  add("ep2_overlap", moe_model_of(2, 2), 2, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::flex;
    c.merged = true;
    c.overlap = {.delay_weight_gradients = true, .shared_expert = true};
    c.micro_batches = 3;
  });
  return all;
}

class RecomputeLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(RecomputeLayout, KeepsEveryBit) {
  const Outcome expected = run_layout(GetParam());
  for (const Named& each : all_options()) {
    SCOPED_TRACE(each.name);
    LayoutCase c = GetParam();
    c.recompute = each.options;
    expect_same_bits(expected, run_layout(c));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, RecomputeLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

struct Planned {
  TrainingStep step;
  MemoryPlan plan;
};

// In f32. `part`: of the first rank.
Planned plan_step(const ModelConfig& model, const ModelPart& part,
                  const RecomputeOptions& recompute, int32_t sequence) {
  const ModelState state = declare_model_state(model, DType::f32, /*trained=*/true, part);
  Planned planned;
  planned.step = build_training_step(model, state, {.sequence = sequence, .recompute = recompute});
  verify_program(*planned.step.program);
  planned.plan = plan_memory(*planned.step.program, 1);
  verify_memory_plan(*planned.step.program, planned.plan);
  return planned;
}

// On one rank.
Planned plan_step(const ModelConfig& model, const RecomputeOptions& recompute,
                  int32_t sequence = 64) {
  const ModelPart alone{
      .run = std::make_shared<const RunLayout>(layout_of_one_rank(model.num_layers)), .rank = 0};
  return plan_step(model, alone, recompute, sequence);
}

uint64_t activations(const Planned& planned) {
  return planned.plan.transient_bytes;
}

TEST(RecomputeMemory, NeedsFewerBytes) {
  ModelConfig moe = mixtral_like_model(8);
  moe.moe_shared_expert_intermediate_size = 448;
  ModelConfig dense = dense_model(8);
  for (const auto& [name, model] : {NamedModel{"moe", moe}, NamedModel{"dense", dense}}) {
    const uint64_t kept = activations(plan_step(model, {}));
    for (const Named& each : all_options()) {
      const auto chooses = [&](const ModuleSpec& module) {
        return chosen_of(each.options.modules, &module) != nullptr;
      };
      const bool of_experts = chooses(kExpertActivationModule) || chooses(kExpertRowsModule) ||
                              chooses(kSharedExpertModule);
      const bool has_it = each.options.granularity == Granularity::full || chooses(kNormModule) ||
                          chooses(kCoreAttentionModule) ||
                          (name == "moe" ? of_experts : chooses(kMlpModule));
      const uint64_t bytes = activations(plan_step(model, each.options));
      if (has_it) {
        EXPECT_LT(bytes, kept) << name << " " << each.name;
      } else {
        EXPECT_EQ(bytes, kept) << name << " " << each.name;
      }
    }
  }
}

// The rows that attention gathers from the ranks of TP are gathered again. Of a layer two branches
// are kept for them and for the sum between the norms, each half as large as what is gathered.
TEST(RecomputeMemory, NormsAreGatheredAgain) {
  constexpr int32_t kLayers = 8;
  constexpr int32_t kSequence = 64;
  LayoutCase c;
  c.model = dense_model_of(kLayers);
  c.model.hidden_dropout = c.model.attention_dropout = 0;
  c.layout.world_size = c.layout.tensor_parallel = 2;
  c.layout.sequence_parallel = true;
  const ModelPart part{.run = run_layout_of(c), .rank = 0};
  const uint64_t kept = activations(plan_step(c.model, part, {}, kSequence));
  const uint64_t again = activations(
      plan_step(c.model, part, {.granularity = Granularity::selective, .modules = {&kNormModule}},
                kSequence));
  // Of one rank. Memory is fullest in the backward, where the last layers are computed again.
  const uint64_t stream = uint64_t{kSequence} / 2 * 32 * sizeof(float);
  EXPECT_LE(again + (kLayers - 2) * stream, kept);
}

// With whole layers what is kept of a group of layers is two tensors of the residual stream:
// activations grow by no more with each group.
TEST(RecomputeMemory, WholeLayersKeepTheStreamAndTheBranch) {
  constexpr int32_t kSequence = 64;
  for (const int32_t layers : {1, 2, 4}) {
    const RecomputeOptions full{.granularity = Granularity::full, .layers = layers};
    const uint64_t few = activations(plan_step(mixtral_like_model(4), full, kSequence));
    const uint64_t many = activations(plan_step(mixtral_like_model(12), full, kSequence));
    const uint64_t stream = uint64_t{kSequence} * 128 * sizeof(float);
    EXPECT_LE(many - few, 8 / static_cast<uint64_t>(layers) * 2 * stream + 8 * stream / 16)
        << layers << " layers; a sixteenth is for the numbers that metrics are made of";
  }
}

// What is not needed is not computed again: of a recomputed MoE block the combination.
TEST(RecomputeMemory, NothingIsComputedInVain) {
  for (const Named& each : all_options()) {
    ModelConfig model = mixtral_like_model(3);
    model.moe_shared_expert_intermediate_size = 448;
    const Planned planned = plan_step(model, each.options);
    const Program& program = *planned.step.program;
    std::vector<bool> read(static_cast<size_t>(program.value_count()), false);
    for (int32_t index = 0; index < program.op_count(); ++index) {
      for (const ValueId id : program.inputs(program.op(index))) {
        if (!id.valid()) continue;
        read[static_cast<size_t>(id.index)] = true;
        const RowCount& rows = program.value(id).rows;
        if (rows.valid()) read[static_cast<size_t>(rows.counter.index)] = true;
      }
    }
    for (int32_t index = 0; index < program.op_count(); ++index) {
      const Op& op = program.op(index);
      if (op.place.phase != Phase::recompute) continue;
      const auto outputs = program.outputs(op);
      EXPECT_TRUE(std::any_of(outputs.begin(), outputs.end(),
                              [&](ValueId id) { return read[static_cast<size_t>(id.index)]; }))
          << each.name << ": operation " << index;
      const Op& original = program.op(op.place.recompute_of);
      EXPECT_EQ(original.spec, op.spec) << each.name << ": operation " << index;
      EXPECT_EQ(original.place.phase, Phase::forward);
      EXPECT_EQ(original.place.layer, op.place.layer);
      EXPECT_LT(op.place.recompute_of, index);
    }
  }
}

std::set<int32_t> recomputed_layers(const Program& program) {
  std::set<int32_t> layers;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Place& place = program.op(index).place;
    if (place.phase == Phase::recompute) layers.insert(place.layer);
  }
  return layers;
}

// By block exactly that many layers of each stage are computed again, the first ones; uniformly
// all.
TEST(RecomputedLayers, AreThoseThatTheMethodNames) {
  const auto block = [](int32_t layers) {
    return RecomputeOptions{
        .granularity = Granularity::full, .method = Method::block, .layers = layers};
  };
  const ModelConfig model = dense_model_of(4);
  const auto of_one_rank = [&](const RecomputeOptions& options) {
    return recomputed_layers(*plan_step(model, options).step.program);
  };
  EXPECT_EQ(of_one_rank(block(1)), (std::set<int32_t>{0}));
  EXPECT_EQ(of_one_rank(block(3)), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(of_one_rank(block(4)), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(of_one_rank({.granularity = Granularity::full, .layers = 2}),
            (std::set<int32_t>{0, 1, 2, 3}));
  LayoutCase c;
  c.model = model;
  c.layout.world_size = c.layout.pipeline_parallel = 2;
  const ModelPart second{.run = run_layout_of(c), .rank = 1};
  EXPECT_EQ(recomputed_layers(*plan_step(model, second, block(1), 16).step.program),
            (std::set<int32_t>{2}));
}

TEST(RecomputeMemory, StepAsText) {
  ModelConfig model = moe_model(1);
  model.moe_aux_loss_coeff = model.moe_z_loss_coeff = 0;
  const Planned planned = plan_step(
      model, {.granularity = Granularity::selective, .modules = {&kNormModule, &kMoeModule}}, 16);
  expect_golden(print_program(*planned.step.program, {}), "recomputed_training_step.txt");
}

}  // namespace
}  // namespace troupe::testing
