// Inputs of activations that wait for the backward pass as codes: the numbers of every layout are
// those of one rank, and of what experts make only the codes are kept.
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/blocks/dense_mlp.h"
#include "model/blocks/moe.h"
#include "ops/elementwise/activation/activation.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

// A dense layer, and one of experts and a shared one.
LayoutCase case_of(const std::string& name, int32_t ranks) {
  LayoutCase c;
  c.name = name;
  c.model = auxiliary_loss_models(moe_model(2))[1].config;
  c.model.ffn_hidden_size = 64;
  c.model.moe_ffn_hidden_size = 64;
  c.model.moe_shared_expert_intermediate_size = 64;
  c.layout.world_size = ranks;
  c.layout.expert_tensor_parallel = 1;
  c.micro_batches = 2;
  c.precision.stores_activation_inputs = true;
  return c;
}

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const std::string& name, int32_t ranks, const auto& configure) {
    all.push_back(case_of(name, ranks));
    configure(all.back());
  };
  add("tp2", 2, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.sequence_parallel = true;
  });
  add("etp2", 2, [](LayoutCase& c) { c.layout.expert_tensor_parallel = 2; });
  add("ep2_alltoall_room", 2, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::alltoall;
    c.expert_room = 0.5;
  });
  add("pp2_ep2_merged", 4, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.layout.expert_parallel = 2;
    c.micro_batches = 4;
    c.merged = true;
  });
  return all;
}

class StoredActivations : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(StoredActivations, AgreeWithOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Layouts, StoredActivations, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(StoredActivations, HaveTheSameBitsWhenTheyAreComputedAgain) {
  LayoutCase c = case_of("bf16", 1);
  c.dtype = DType::bf16;
  const Outcome expected = run_layout(c);
  LayoutCase whole = c;
  whole.precision.stores_activation_inputs = false;
  EXPECT_NE(expected, run_layout(whole)) << "the gradient is at the rounded input";
  for (const RecomputeOptions& recompute :
       {RecomputeOptions{.granularity = RecomputeOptions::Granularity::full},
        RecomputeOptions{.granularity = RecomputeOptions::Granularity::selective,
        .modules = {&kMlpModule, &kMoeModule}}}) {
    c.recompute = recompute;
    expect_same_bits(expected, run_layout(c));
  }
}

// Nothing but the forward pass reads what activations read.
TEST(StoredActivations, AreAllThatIsKeptOfTheInputs) {
  LayoutCase c = case_of("kept", 1);
  c.dtype = DType::bf16;
  const std::unique_ptr<const Program> program = program_of(c, 0);
  std::set<int32_t> inputs;
  for (int32_t index = 0; index < program->op_count(); ++index) {
    const Op& op = program->op(index);
    if (op.spec == &kActivation) inputs.insert(program->inputs(op)[0].index);
    if (op.place.phase == Phase::forward) continue;
    for (const ValueId read : program->inputs(op)) {
      EXPECT_FALSE(inputs.contains(read.index)) << program->value(read).name;
    }
  }
  EXPECT_EQ(inputs.size(), 6U) << "of two micro-batches";
}

}  // namespace
}  // namespace troupe::testing
