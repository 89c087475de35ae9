// Overlap changes the order of a step and nothing else: with each form, and with all of them, a run
// leaves the bits that it leaves without, on every rank, in layouts of EP, ETP, TP, CP, DP and PP
// with all dispatchers; and what one rank leaves, up to rounding. Merged forwards and backwards
// hide every exchange but those of the first forward and the last backward.
#include "passes/overlap.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "model/blocks/moe.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "plan/exposure.h"
#include "plan/print.h"
#include "program/golden.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

// Two MoE layers, or three with a dense one; a shared expert with a gate; losses of each kind.
ModelConfig model_of(int32_t layers) {
  ModelConfig model = auxiliary_loss_models(moe_model(layers))[layers % 2 == 0 ? 2 : 1].config;
  model.num_query_groups = 4;
  model.num_experts = 8;
  model.hidden_dropout = 0.1;
  model.moe_shared_expert_intermediate_size = 32;
  return model;
}

struct OverlapCase {
  LayoutCase layout;
  bool may_merge = true;
};

void PrintTo(const OverlapCase& c, std::ostream* out) {
  *out << c.layout.name;
}

std::vector<OverlapCase> cases() {
  std::vector<OverlapCase> all;
  const auto add = [&](const std::string& name, int32_t layers, int32_t ranks,
                       const auto& configure) {
    LayoutCase c;
    c.name = name;
    c.model = model_of(layers);
    c.layout.world_size = ranks;
    c.layout.expert_tensor_parallel = 1;
    c.layout.sequence_parallel = true;
    c.layout.expert_parallel = 2;
    c.micro_batches = 4;
    c.sequence = 16;
    c.dispatcher = TokenDispatcher::alltoall;
    configure(c);
    all.push_back({c, c.schedule == PipelineSchedule::one_f_one_b});
  };
  add("ep2_allgather", 2, 2, [](LayoutCase& c) { c.dispatcher = TokenDispatcher::allgather; });
  add("ep2_alltoall", 2, 2, [](LayoutCase&) {});
  add("ep2_flex_dense_layer", 3, 2, [](LayoutCase& c) { c.dispatcher = TokenDispatcher::flex; });
  add("one_micro_batch", 2, 2, [](LayoutCase& c) { c.micro_batches = 1; });
  add("tp2_ep4_etp1", 2, 4, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.expert_parallel = 4;
    c.micro_batches = 3;
  });
  add("tp2_cp2_ep2_etp2_distributed", 2, 4, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.context_parallel = 2;
    c.layout.expert_tensor_parallel = 2;
    c.sharding = StateSharding::optimizer;
  });
  add("ep2_sharded_parameters", 2, 4, [](LayoutCase& c) {
    c.sharding = StateSharding::parameters;
    c.early_collectives = true;
  });
  add("pp2", 4, 4, [](LayoutCase& c) { c.layout.pipeline_parallel = 2; });
  add("pp4_ep2_flex", 4, 8, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 4;
    c.dispatcher = TokenDispatcher::flex;
    c.micro_batches = 9;
  });
  add("pp2_interleaved", 4, 4, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.chunks = 2;
  });
  add("pp2_zb_h1", 2, 4, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.schedule = PipelineSchedule::zb_h1;
  });
  return all;
}

class Overlap : public ::testing::TestWithParam<OverlapCase> {};

TEST_P(Overlap, KeepsEveryBit) {
  const LayoutCase& plain = GetParam().layout;
  const Outcome expected = run_layout(plain);
  expect_same_outcome(run_one_rank(plain), expected);
  const auto run_with = [&](bool merged, bool weight_gradients, bool shared_expert) {
    SCOPED_TRACE("merged " + std::to_string(merged) + ", delayed weight gradients " +
                 std::to_string(weight_gradients) + ", shared expert " +
                 std::to_string(shared_expert));
    LayoutCase c = plain;
    c.merged = merged;
    c.overlap = {.delay_weight_gradients = weight_gradients, .shared_expert = shared_expert};
    expect_same_bits(expected, run_layout(c));
  };
  run_with(false, true, false);
  run_with(false, false, true);
  run_with(false, true, true);
  if (!GetParam().may_merge) return;
  run_with(true, false, false);
  run_with(true, true, true);
}

INSTANTIATE_TEST_SUITE_P(Layouts, Overlap, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.layout.name; });

// The first rank's program.
TrainingStep step_of(const LayoutCase& c, int32_t rank = 0) {
  const ModelState state = declare_model_state(c.model, DType::f32, /*trained=*/true,
                                               {.run = run_layout_of(c), .rank = rank});
  return build_training_step(c.model, state,
                             {.micro_batch_size = c.micro_batch_size,
                              .micro_batches = c.micro_batches,
                              .sequence = c.sequence,
                              .dispatcher = c.dispatcher,
                              .overlap = c.overlap,
                              .recompute = c.recompute});
}

// Of a layer with routed experts alone: nothing covers an exchange of itself.
LayoutCase bare(int32_t layers, int32_t micro_batches) {
  LayoutCase c;
  c.model = moe_model(layers);
  c.model.moe_aux_loss_coeff = c.model.moe_z_loss_coeff = 0;
  c.layout.world_size = c.layout.expert_parallel = 2;
  c.layout.expert_tensor_parallel = 1;
  c.micro_batches = micro_batches;
  c.dispatcher = TokenDispatcher::flex;
  return c;
}

// Flex has one exchange each way. A layer and micro-batch has four: dispatch and combination of the
// forward and of the backward.
TEST(OverlapExposure, MergedStepsHideAllButTheFirstForwardAndTheLastBackward) {
  for (const int32_t micro_batches : {2, 4, 7}) {
    for (const int32_t layers : {1, 3}) {
      LayoutCase c = bare(layers, micro_batches);
      const Exposure plain = measure_exposure(*step_of(c).program);
      EXPECT_EQ(plain.exchanges, 4 * layers * micro_batches);
      c.merged = true;
      const Exposure merged = measure_exposure(*step_of(c).program);
      EXPECT_EQ(merged.exchanges, plain.exchanges);
      EXPECT_EQ(merged.covered, merged.exchanges - 4 * layers)
          << layers << " layers, " << micro_batches << " micro-batches: " << text_of(merged);
      EXPECT_GT(merged.flops, plain.flops);
    }
  }
}

// A recomputed MoE block has a dispatch more in its backward; the forward's work is spread over
// all.
TEST(OverlapExposure, MergedStepsHideRecomputedExchanges) {
  LayoutCase c = bare(3, 4);
  c.recompute = {.granularity = RecomputeOptions::Granularity::selective, .modules = {&kMoeModule}};
  c.merged = true;
  const Exposure exposure = measure_exposure(*step_of(c).program);
  EXPECT_EQ(exposure.exchanges, (4 + 1) * 3 * 4);
  EXPECT_EQ(exposure.covered, exposure.exchanges - (4 + 1) * 3) << text_of(exposure);
}

// As above in a pipeline: of a rank's chunks, what is in no pair of a forward and a backward stays
// exposed.
TEST(OverlapExposure, PipelinesHideTheSteadyState) {
  for (const int32_t chunks : {1, 2}) {
    LayoutCase c = bare(4, 8);
    c.layout.world_size = 4;
    c.layout.pipeline_parallel = 2;
    c.chunks = chunks;
    c.merged = true;
    const int32_t layers = 4 / 2 / chunks;  // of one piece of work
    for (const int32_t rank : {0, 3}) {
      const Exposure exposure = measure_exposure(*step_of(c, rank).program);
      const int32_t place = rank == 0 ? 0 : 1;
      const int32_t warm_up = 2 * (1 - place) + (chunks - 1) * 2 + 1;
      EXPECT_EQ(exposure.exchanges, 4 * 2 * 8);
      EXPECT_EQ(exposure.covered, exposure.exchanges - 4 * layers * warm_up)
          << chunks << " chunks, rank " << rank << ": " << text_of(exposure);
    }
  }
}

TEST(OverlapExposure, DelayedWeightGradientsStandBehindTheBackwardExchanges) {
  LayoutCase c = bare(2, 2);
  const Exposure plain = measure_exposure(*step_of(c).program);
  c.overlap.delay_weight_gradients = true;
  const Exposure delayed = measure_exposure(*step_of(c).program);
  // Both exchanges of the backward of each layer; the forward's stay as they are.
  EXPECT_EQ(delayed.covered - plain.covered, 2 * 2 * 2) << text_of(plain);
}

// Of each exchange between ranks that share the experts: does it follow another one directly?
std::vector<bool> exchanges_in_a_row(const Program& program) {
  std::vector<bool> in_a_row;
  bool was_exchange = false;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    const bool is_exchange = op.place.module == &kMoeModule && op.spec->group != nullptr &&
                             op.spec->group(op.attributes) == RankGroup::etp_ep;
    if (is_exchange) in_a_row.push_back(was_exchange);
    was_exchange = is_exchange;
  }
  return in_a_row;
}

// They stand after the last of several exchanges in a row: work between them would hold up those
// that follow.
TEST(OverlapExposure, DelayedWeightGradientsLeaveExchangesInARowTogether) {
  for (const TokenDispatcher dispatcher : {TokenDispatcher::allgather, TokenDispatcher::alltoall}) {
    SCOPED_TRACE(std::string(name_of(dispatcher)));
    LayoutCase c = bare(2, 2);
    c.dispatcher = dispatcher;
    const std::vector<bool> plain = exchanges_in_a_row(*step_of(c).program);
    EXPECT_TRUE(std::find(plain.begin(), plain.end(), true) != plain.end());
    c.overlap.delay_weight_gradients = true;
    const std::vector<bool> delayed = exchanges_in_a_row(*step_of(c).program);
    ASSERT_EQ(delayed.size(), plain.size());
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(delayed[i] || !plain[i]) << "exchange " << i;
    }
  }
}

TEST(OverlapExposure, TheSharedExpertStandsBehindDispatchAndCombination) {
  LayoutCase c = bare(2, 2);
  c.model.moe_shared_expert_intermediate_size = 32;
  const Exposure plain = measure_exposure(*step_of(c).program);
  // Without it the shared expert stands after the combination already, whole.
  EXPECT_EQ(plain.covered, 2 * 2);
  c.overlap.shared_expert = true;
  const Exposure spread = measure_exposure(*step_of(c).program);
  EXPECT_EQ(spread.covered, spread.exchanges) << text_of(spread);
}

// Merged passes are one run of the memory plan: it wastes little and does not grow with the
// micro-batches, and what is live is one micro-batch more.
TEST(OverlapMemory, MergedStepsArePlannedLikeOthers) {
  LayoutCase c = bare(6, 8);
  c.sequence = 64;
  c.merged = true;
  for (const auto& [delayed, device] : {std::pair(false, Device::cpu),
                                        {true, Device::cpu},
                                        {false, Device::cuda},
                                        {true, Device::cuda}}) {
    c.overlap.delay_weight_gradients = delayed;
    const auto plan = [&, on = device](int32_t micro_batches) {
      c.micro_batches = micro_batches;
      const TrainingStep step = step_of(c);
      const MemoryPlan plan = plan_memory(*step.program, 1, on);
      verify_memory_plan(*step.program, plan);
      return plan;
    };
    const MemoryPlan few = plan(8);
    EXPECT_EQ(plan(16).transient_bytes, few.transient_bytes);
    EXPECT_LE(static_cast<double>(few.transient_bytes),
              1.25 * static_cast<double>(few.largest_live_bytes));
    EXPECT_LE(few.transient_bytes, 2 * plan(1).transient_bytes);
  }
}

// The first micro-batch's backward and the second one's forward, operation by operation.
TEST(OverlapExposure, MergedStepAsText) {
  LayoutCase c = bare(1, 2);
  c.merged = true;
  expect_golden(print_program(*step_of(c).program, {}), "merged_training_step.txt");
}

}  // namespace
}  // namespace troupe::testing
