// A pass that the program does not have, made in this file alone: activations are computed a second
// time before the operation that reads them first, which reads the second ones. In every layout the
// step keeps its bits.
#include <gtest/gtest.h>

#include "model/blocks/moe.h"
#include "ops/elementwise/activation/activation.h"
#include "program/rewrite.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

bool is_forward_activation(const Op& op) {
  return op.spec == &kActivation && op.place.phase == Phase::forward;
}

std::vector<int32_t> compute_activations_twice(Program& program) {
  Rewrite rewrite(program);
  const int32_t count = program.op_count();
  IdVector<ValueId, int32_t> maker(program.value_count(), -1);
  for (int32_t index = 0; index < count; ++index) {
    const Op op = program.op(index);
    for (const ValueId input :
         std::vector<ValueId>(program.inputs(op).begin(), program.inputs(op).end())) {
      if (!input.valid() || !maker.has(input) || maker[input] < 0) continue;
      const Op made_by = program.op(std::exchange(maker[input], -1));
      const auto inputs = program.inputs(made_by);
      const ValueId again =
          rewrite
              .insert_before(index, made_by.place,
                             [&](Builder& builder) {
                               return builder.emit(
                                   *made_by.spec, made_by.attributes,
                                   std::vector<ValueId>(inputs.begin(), inputs.end()), "again");
                             })
              .front();
      program.replace_read(index, input, again);
    }
    if (is_forward_activation(op)) maker[program.outputs(op).front()] = index;
  }
  return rewrite.order();
}

int count_activations(const Program& program) {
  int count = 0;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (is_forward_activation(program.op(index))) ++count;
  }
  return count;
}

TEST(ToyPass, ChangesNoBit) {
  LayoutCase c;
  c.model = moe_model(4);
  c.micro_batches = 2;
  c.layout.world_size = 4;
  const auto compare = [](LayoutCase layout) {
    const Outcome expected = run_layout(layout);
    const int before = count_activations(*program_of(layout, 0));
    layout.added_passes = {{"twice", compute_activations_twice}};
    EXPECT_EQ(count_activations(*program_of(layout, 0)), 2 * before);
    expect_same_bits(expected, run_layout(layout));
  };
  LayoutCase tensor = c;
  tensor.layout.tensor_parallel = tensor.layout.expert_parallel = 2;
  tensor.layout.sequence_parallel = true;
  compare(tensor);
  LayoutCase pipeline = c;
  pipeline.layout.pipeline_parallel = 2;
  pipeline.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                        .modules = {&kMoeModule}};
  compare(pipeline);
  LayoutCase sharded = c;
  sharded.sharding = StateSharding::parameters;
  sharded.early_collectives = true;
  compare(sharded);
}

TEST(ToyPass, IsWatchedByItsName) {
  LayoutCase c;
  c.model = moe_model(1);
  c.added_passes = {{"twice", compute_activations_twice}};
  PassRecord last;
  program_of(c, 0, [&](const PassRecord& record, const Program&) { last = record; });
  EXPECT_EQ(last.id, PassId::added);
  EXPECT_EQ(last.name, "twice");
  EXPECT_EQ(last.ops_after, last.ops_before + 1);
}

}  // namespace
}  // namespace troupe::testing
