// Offload changes where activations wait and nothing else: with every module, with all of them, and
// with every form of recompute, a run leaves the bits that it leaves without, with dropout, jitter
// and every kind of loss, on one rank and in layouts of EP, TP, CP and PP. What is saved is what
// the plan says, and nothing is copied that is not read.
#include "passes/offload.h"

#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/blocks/dense_mlp.h"
#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "ops/exchange/offload/offload.h"
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

struct Named {
  std::string name;
  OffloadOptions options;
};

constexpr std::array kOffloadModules = {
    &kInputNormModule,       &kQkvModule,       &kCoreAttentionModule,   &kAttentionOutModule,
    &kFeedForwardNormModule, &kExpertFc1Module, &kExpertActivationModule};

OffloadOptions all_modules() {
  return {.modules = ModuleSet(kOffloadModules.begin(), kOffloadModules.end()),
          .least_elements = 1};
}

std::vector<Named> single_modules() {
  std::vector<Named> all;
  for (const ModuleSpec* module : kOffloadModules) {
    all.push_back({module->offload, {.modules = {module}, .least_elements = 1}});
  }
  return all;
}

std::vector<RecomputeOptions> recompute_options() {
  return {
      {.granularity = Granularity::selective, .modules = {&kCoreAttentionModule, &kNormModule}},
      {.granularity = Granularity::selective, .modules = {&kExpertActivationModule, &kMlpModule}},
      {.granularity = Granularity::selective, .modules = {&kMoeModule}},
      {.granularity = Granularity::full},
      {.granularity = Granularity::full, .layers = 2},
      {.granularity = Granularity::full, .method = RecomputeOptions::Method::block}};
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
  add("dense_layer_norm_tp2_cp2", dense_model_of(3), 4, [](LayoutCase& c) {
    c.model.normalization = Normalization::layer_norm;
    c.layout.tensor_parallel = 2;
    c.layout.context_parallel = 2;
    c.layout.expert_tensor_parallel = 2;
    c.context_exchange = ContextExchange::a2a;
  });
  add("moe", moe_model_of(4, 1), 1, [](LayoutCase&) {});
  add("moe_biases", moe_model_of(3, 2), 1, [](LayoutCase& c) { c.model.add_bias_linear = true; });
  add("ep2_alltoall", moe_model_of(3, 2), 2, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::alltoall;
  });
  add("tp2_ep2_etp2_cp2", moe_model_of(3, 0), 4, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.context_parallel = 2;
    c.layout.expert_parallel = 2;
    c.layout.expert_tensor_parallel = 2;
    c.context_exchange = ContextExchange::allgather;
  });
  add("pp2_ep2_flex", moe_model_of(6, 2), 4, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::flex;
    c.micro_batches = 3;
  });
  add("pp2_zb_v", moe_model_of(8, 0), 2, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.schedule = PipelineSchedule::zb_v;
    c.chunks = 2;
  });
  add("pp2_interleaved", dense_model_of(8), 2, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.chunks = 2;
    c.micro_batches = 4;
  });
  add("ep2_sharded_parameters", moe_model_of(3, 0), 4, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.sharding = StateSharding::parameters;
    c.early_collectives = true;
    c.merged = true;
  });
  add("ep2_overlap", moe_model_of(3, 2), 2, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::flex;
    c.merged = true;
    c.overlap = {.delay_weight_gradients = true, .shared_expert = true};
    c.micro_batches = 3;
  });
  return all;
}

class OffloadLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(OffloadLayout, KeepsEveryBit) {
  const Outcome expected = run_layout(GetParam());
  std::vector<Named> all = single_modules();
  all.push_back({"all", all_modules()});
  for (const Named& each : all) {
    SCOPED_TRACE(each.name);
    LayoutCase c = GetParam();
    c.offload = each.options;
    expect_same_bits(expected, run_layout(c));
  }
}

TEST_P(OffloadLayout, KeepsEveryBitWithRecompute) {
  const Outcome expected = run_layout(GetParam());
  for (const RecomputeOptions& recompute : recompute_options()) {
    LayoutCase c = GetParam();
    c.offload = all_modules();
    c.recompute = recompute;
    c.optimizer_offload = 0.5;
    expect_same_bits(expected, run_layout(c));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, OffloadLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

struct Planned {
  TrainingStep step;
  MemoryPlan plan;
  const Program& program() const { return *step.program; }
};

struct Wanted {
  OffloadOptions offload = {};
  RecomputeOptions recompute = {};
  int32_t micro_batches = 1;
  Device device = Device::cpu;
};

constexpr int32_t kSequence = 64;

// In f32.
Planned plan_step(const ModelConfig& model, const Wanted& wanted) {
  const ModelState state = declare_model_state(model, DType::f32, /*trained=*/true);
  Planned planned;
  planned.step = build_training_step(model, state,
                                     {.micro_batches = wanted.micro_batches,
                                      .sequence = kSequence,
                                      .recompute = wanted.recompute,
                                      .offload = wanted.offload});
  verify_program(*planned.step.program);
  planned.plan = plan_memory(*planned.step.program, 1, wanted.device);
  verify_memory_plan(*planned.step.program, planned.plan);
  return planned;
}

std::vector<int32_t> ops_of(const Program& program, const OpSpec& spec) {
  std::vector<int32_t> list;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (program.op(index).spec == &spec) list.push_back(index);
  }
  return list;
}

uint64_t copied_bytes(const Program& program, const OpSpec& spec) {
  uint64_t sum = 0;
  for (const int32_t index : ops_of(program, spec)) {
    sum += program.value(program.outputs(program.op(index))[0]).bytes();
  }
  return sum;
}

ModelConfig model_of(const std::string& name, int32_t layers) {
  return name == "moe" ? mixtral_like_model(layers) : dense_model(layers);
}

// Every copy out has one copy in, whose result a gradient or a clone reads; nothing that is copied
// out is used between the two.
void expect_useful(const Program& program) {
  const std::vector<int32_t> out = ops_of(program, kOffload);
  const std::vector<int32_t> in = ops_of(program, kReload);
  ASSERT_EQ(out.size(), in.size());
  EXPECT_EQ(copied_bytes(program, kOffload), copied_bytes(program, kReload));
  std::vector<std::vector<int32_t>> uses(static_cast<size_t>(program.value_count()));
  for (int32_t index = 0; index < program.op_count(); ++index) {
    for (const ValueId id : program.inputs(program.op(index))) {
      if (id.valid()) uses[static_cast<size_t>(id.index)].push_back(index);
    }
  }
  const auto uses_of = [&](ValueId id) { return uses[static_cast<size_t>(id.index)]; };
  for (const int32_t index : out) {
    const Op& op = program.op(index);
    const ValueId original = program.inputs(op)[0];
    const std::string& name = program.value(original).name;
    EXPECT_EQ(op.place.queue, Queue::copy);
    EXPECT_EQ(op.place.phase, Phase::forward) << name;
    EXPECT_EQ(uses_of(original).back(), index) << name << " is used after it was copied out";
    const std::vector<int32_t> readers = uses_of(program.outputs(op)[0]);
    ASSERT_EQ(readers.size(), 1U) << name;
    const Op& reload = program.op(readers[0]);
    EXPECT_EQ(reload.spec, &kReload) << name;
    EXPECT_EQ(reload.place.queue, Queue::copy);
    EXPECT_FALSE(uses_of(program.outputs(reload)[0]).empty()) << name << " is copied and not read";
  }
}

TEST(OffloadMemory, CopiesWhatIsRead) {
  for (const std::string name : {"moe", "dense"}) {
    const ModelConfig model = model_of(name, 4);
    std::vector<RecomputeOptions> recompute = recompute_options();
    recompute.push_back({});
    std::vector<Named> offload = single_modules();
    offload.push_back({"all", all_modules()});
    for (const Named& each : offload) {
      for (const RecomputeOptions& again : recompute) {
        SCOPED_TRACE(name + " " + each.name);
        expect_useful(plan_step(model, {.offload = each.options, .recompute = again}).program());
      }
    }
  }
}

// Of each module and layer one tensor, of all layers but the last.
TEST(OffloadMemory, CopiesTheInputsOfModules) {
  constexpr int32_t kLayers = 4;
  const ModelConfig model = mixtral_like_model(kLayers);
  const int64_t hidden = model.hidden_size;
  const int64_t qkv = model.kv_channels * (model.num_attention_heads + 2 * model.num_query_groups);
  const int64_t rows = model.moe_router_topk;
  const std::vector<int64_t> columns = {
      hidden, hidden, qkv, hidden, hidden, rows * hidden, rows * 2 * model.moe_ffn_hidden_size};
  std::vector<Named> modules = single_modules();
  for (size_t i = 0; i < modules.size(); ++i) {
    SCOPED_TRACE(modules[i].name);
    modules[i].options.least_elements = kSequence * 16;
    const Planned planned = plan_step(model, {.offload = modules[i].options});
    EXPECT_EQ(ops_of(planned.program(), kOffload).size(), size_t{kLayers} - 1);
    const uint64_t bytes = static_cast<uint64_t>((kLayers - 1) * kSequence * columns[i]) * 4;
    EXPECT_EQ(copied_bytes(planned.program(), kOffload), bytes);
    EXPECT_EQ(planned.plan.host_transient_bytes, bytes) << "all live between forward and backward";
    EXPECT_EQ(planned.plan.host_bytes_by_role[static_cast<size_t>(Role::offloaded)], bytes);
    for (const int32_t index : ops_of(planned.program(), kOffload)) {
      EXPECT_LT(planned.program().op(index).place.layer, kLayers - 1);
    }
  }
}

// What is copied out is what the device has not to hold, except what is on its way back while the
// backward is at its fullest: a layer's worth, and what lies beside it.
TEST(OffloadMemory, SavesWhatItCopies) {
  constexpr int32_t kLayers = 12;
  for (const std::string name : {"moe", "dense"}) {
    const ModelConfig model = model_of(name, kLayers);
    const Planned plain = plan_step(model, {});
    std::vector<Named> modules = single_modules();
    modules.push_back({"all", all_modules()});
    for (const Named& each : modules) {
      SCOPED_TRACE(name + " " + each.name);
      const Planned planned = plan_step(model, {.offload = each.options});
      const uint64_t copied = copied_bytes(planned.program(), kOffload);
      EXPECT_EQ(planned.plan.host_bytes() >= copied, true);
      if (copied == 0) {
        EXPECT_EQ(planned.plan.transient_bytes, plain.plan.transient_bytes);
        continue;
      }
      const uint64_t of_a_layer = copied / (kLayers - 1);
      const uint64_t slack = plain.plan.transient_bytes / 20;
      EXPECT_LE(planned.plan.transient_bytes,
                plain.plan.transient_bytes - copied + 2 * of_a_layer + slack);
      EXPECT_GE(planned.plan.transient_bytes + copied, plain.plan.largest_live_bytes);
      EXPECT_EQ(planned.plan.total_bytes(),
                planned.plan.device_bytes() + planned.plan.host_bytes());
    }
  }
}

TEST(OffloadMemory, OfAGpuTheHostIsApart) {
  const ModelConfig model = mixtral_like_model(4);
  const Planned plain = plan_step(model, {.device = Device::cuda});
  const Planned planned = plan_step(model, {.offload = all_modules(), .device = Device::cuda});
  EXPECT_EQ(planned.plan.total_bytes(), planned.plan.device_bytes());
  EXPECT_LT(planned.plan.total_bytes(), plain.plan.total_bytes());
  EXPECT_GT(planned.plan.host_bytes(), 0U);
}

TEST(OffloadMemory, DoesNotGrowWithTheMicroBatches) {
  const ModelConfig model = mixtral_like_model(4);
  const Planned one = plan_step(model, {.offload = all_modules()});
  const Planned five = plan_step(model, {.offload = all_modules(), .micro_batches = 5});
  EXPECT_EQ(one.plan.transient_bytes, five.plan.transient_bytes);
  EXPECT_EQ(one.plan.host_transient_bytes, five.plan.host_transient_bytes);
}

// A reload has the gradients of a whole layer to arrive in.
TEST(OffloadMemory, ReloadsALayerAhead) {
  const Planned planned = plan_step(mixtral_like_model(5), {.offload = all_modules()});
  const Program& program = planned.program();
  for (const int32_t index : ops_of(program, kReload)) {
    const ValueId result = program.outputs(program.op(index))[0];
    const int16_t layer = program.op(index).place.layer;
    int32_t between = 0;  // data gradients of the next layer
    int32_t reader = index + 1;
    for (; reader < program.op_count(); ++reader) {
      const Op& op = program.op(reader);
      const auto inputs = program.inputs(op);
      if (std::find(inputs.begin(), inputs.end(), result) != inputs.end()) break;
      between += op.place.layer == layer + 1 && op.place.phase == Phase::data_gradient &&
                 op.place.queue == Queue::compute;
    }
    int32_t all = 0;
    for (int32_t i = 0; i < program.op_count(); ++i) {
      const Place& place = program.op(i).place;
      all += place.layer == layer + 1 && place.phase == Phase::data_gradient &&
             place.queue == Queue::compute;
    }
    EXPECT_EQ(between, all) << program.value(result).name << " of layer " << layer;
  }
}

TEST(OffloadMemory, TheFractionCountsGroupsInTheOrderOfTheForward) {
  constexpr int32_t kLayers = 6;
  const ModelConfig model = mixtral_like_model(kLayers);
  const auto copies = [&](double fraction) {
    OffloadOptions options{.modules = {&kFeedForwardNormModule, &kExpertActivationModule}};
    options.least_elements = kSequence * 16;
    options.fraction = fraction;
    const Planned planned = plan_step(model, {.offload = options});
    std::vector<std::pair<int32_t, bool>> groups;  // layer; after the norm
    for (const int32_t index : ops_of(planned.program(), kOffload)) {
      const Place& place = planned.program().op(index).place;
      groups.emplace_back(place.layer, place.module == &kExpertActivationModule);
    }
    std::sort(groups.begin(), groups.end());
    return groups;
  };
  const auto all = copies(1);
  EXPECT_EQ(all.size(), 2 * size_t{kLayers - 1});
  EXPECT_TRUE(copies(0).empty());
  // Of ten, what stays is rounded down.
  for (const auto& [fraction, count] :
       {std::pair{0.5, 5}, std::pair{0.3, 3}, std::pair{0.25, 3}, std::pair{0.01, 1},
        std::pair{0.9, 9}}) {  // 10 (1 - 0.9) is less than 1 in double arithmetic
    const std::vector<std::pair<int32_t, bool>> first(all.begin(), all.begin() + count);
    EXPECT_EQ(copies(fraction), first) << fraction;
  }
}

TEST(OffloadMemory, OfASingleLayerNothingIsCopied) {
  const Planned planned = plan_step(mixtral_like_model(1), {.offload = all_modules()});
  EXPECT_TRUE(ops_of(planned.program(), kOffload).empty()) << "its gradients are next";
}

TEST(OffloadMemory, SmallTensorsStay) {
  const ModelConfig model = mixtral_like_model(4);
  OffloadOptions options = all_modules();
  const int64_t stream = int64_t{kSequence} * model.hidden_size;
  options.least_elements = stream;
  EXPECT_FALSE(ops_of(plan_step(model, {.offload = options}).program(), kOffload).empty());
  options.least_elements = stream + 1;
  const Planned planned = plan_step(model, {.offload = options});
  const Program& program = planned.program();
  std::set<int32_t> layers;
  for (const int32_t index : ops_of(program, kOffload)) {
    EXPECT_GT(program.value(program.outputs(program.op(index))[0]).shape.elements(), stream);
    layers.insert(program.op(index).place.layer);
  }
  // The last layer's are needed at once.
  EXPECT_EQ(layers, (std::set{0, 1, 2})) << "a small tensor keeps larger ones";
  options.least_elements = 1024 * 1024;
  EXPECT_TRUE(ops_of(plan_step(model, {.offload = options}).program(), kOffload).empty());
}

// What whole layers keep, the stream and the branch, waits on the host; the device then holds
// nothing of a layer between forward and backward.
TEST(OffloadMemory, GoesWithFullRecompute) {
  const Wanted wanted{.offload = {.modules = {&kInputNormModule}, .least_elements = 1},
                      .recompute = {.granularity = Granularity::full}};
  const uint64_t stream = uint64_t{kSequence} * 128 * sizeof(float);
  const Planned few = plan_step(mixtral_like_model(4), wanted);
  const Planned many = plan_step(mixtral_like_model(12), wanted);
  EXPECT_LE(many.plan.transient_bytes - few.plan.transient_bytes, 8 * stream / 16)
      << "a sixteenth is for the numbers that metrics are made of";
  EXPECT_EQ(many.plan.host_transient_bytes - few.plan.host_transient_bytes, 8 * 2 * stream);
}

// What recompute discards is not copied.
TEST(OffloadMemory, LeavesOutWhatIsRecomputed) {
  const ModelConfig model = mixtral_like_model(4);
  const RecomputeOptions moe{.granularity = Granularity::selective, .modules = {&kMoeModule}};
  const OffloadOptions experts{.modules = {&kExpertFc1Module, &kExpertActivationModule},
                               .least_elements = 1};
  EXPECT_TRUE(
      ops_of(plan_step(model, {.offload = experts, .recompute = moe}).program(), kOffload).empty());
}

TEST(OffloadMemory, StepAsText) {
  ModelConfig model = moe_model(2);
  model.moe_aux_loss_coeff = model.moe_z_loss_coeff = 0;
  const Planned planned = plan_step(
      model,
      {.offload = {.modules = {&kFeedForwardNormModule, &kExpertFc1Module}, .least_elements = 1}});
  PrintOptions options;
  options.live_bytes = planned.plan.live_bytes;
  options.bytes_by_role = planned.plan.bytes_by_role;
  options.host_bytes_by_role = planned.plan.host_bytes_by_role;
  options.layer = 0;
  expect_golden(print_program(planned.program(), options), "offloaded_training_step.txt");
}

}  // namespace
}  // namespace troupe::testing
