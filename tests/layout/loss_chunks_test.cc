// The loss in chunks of tokens agrees with that of all tokens at once, in layouts, schedules and
// orders of all kinds, with tied embeddings, too. And it needs less memory. (That nothing but the
// order of two sums changes is shown bit by bit in train/training_step_test.cc, with chunks that
// are not so small that BLAS multiplies them in another way.)
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "passes/inference_programs.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "program/verify.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

// Each order of a sum of a hundred terms in f64 is good for 1e-14 of the largest term; what three
// steps make of it stays under a hundred times that.
constexpr double kTolerance = 1e-12;

ModelConfig model_of(int32_t layers, bool tied) {
  ModelConfig model = auxiliary_loss_models(moe_model(layers))[1].config;
  model.num_query_groups = 4;
  model.num_experts = 8;
  model.hidden_dropout = 0.1;
  model.tie_embeddings = tied;
  return model;
}

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const std::string& name, int32_t layers, bool tied, int32_t ranks,
                       const auto& configure) {
    LayoutCase c;
    c.name = name;
    c.model = model_of(layers, tied);
    c.layout.world_size = ranks;
    c.layout.expert_tensor_parallel = 1;
    c.layout.sequence_parallel = true;
    c.micro_batch_size = 2;
    c.micro_batches = 2;
    c.sequence = 16;
    configure(c);
    all.push_back(c);
  };
  add("one_rank", 2, false, 1, [](LayoutCase&) {});
  add("tied", 2, true, 1, [](LayoutCase& c) { c.per_token_loss = true; });
  add("recompute", 3, false, 1,
      [](LayoutCase& c) { c.recompute = {.granularity = RecomputeOptions::Granularity::full}; });
  add("dp2_zero1_early", 2, true, 2, [](LayoutCase& c) {
    c.sharding = StateSharding::optimizer;
    c.early_collectives = true;
  });
  add("dp2_fsdp_early", 2, false, 2, [](LayoutCase& c) {
    c.sharding = StateSharding::parameters;
    c.early_collectives = true;
  });
  add("dp2_fsdp_tied_per_token", 2, true, 2, [](LayoutCase& c) {
    c.sharding = StateSharding::parameters;
    c.per_token_loss = true;
  });
  add("tp2_sequence", 2, true, 2, [](LayoutCase& c) { c.layout.tensor_parallel = 2; });
  add("tp2_cp2_per_token", 2, false, 4, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.context_parallel = 2;
    c.per_token_loss = true;
  });
  add("tp2_rows_everywhere", 2, false, 2, [](LayoutCase& c) {
    c.model = dense_model(2);
    c.model.num_query_groups = 4;
    c.model.tie_embeddings = false;
    c.layout.tensor_parallel = 2;
    c.layout.expert_tensor_parallel = 2;
    c.layout.sequence_parallel = false;
  });
  add("pp2_tied", 4, true, 2, [](LayoutCase& c) { c.layout.pipeline_parallel = 2; });
  add("pp2_interleaved", 4, false, 2, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.chunks = 2;
  });
  add("pp2_zb_h1_tied", 4, true, 2, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.schedule = PipelineSchedule::zb_h1;
  });
  add("pp2_zb_v", 4, false, 2, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.schedule = PipelineSchedule::zb_v;
    c.chunks = 2;
  });
  add("ep2_merged", 2, false, 2, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::alltoall;
    c.merged = true;
    c.overlap = {.delay_weight_gradients = true, .shared_expert = true};
    c.micro_batches = 3;
  });
  return all;
}

class LossChunks : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(LossChunks, AgreeWithOneChunk) {
  const Outcome expected = run_layout(GetParam());
  for (const int32_t tokens : {5, 8}) {
    SCOPED_TRACE(tokens);
    LayoutCase c = GetParam();
    c.loss_chunk_tokens = tokens;
    const Outcome found = run_layout(c);
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [name, values] : expected) {
      const std::vector<double>& others = found.at(name);
      ASSERT_EQ(others.size(), values.size()) << name;
      double largest = 0;
      for (const double value : values) largest = std::max(largest, std::abs(value));
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_NEAR(others[i], values[i], kTolerance * largest) << name << " element " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, LossChunks, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

constexpr int32_t kSequence = 256;
constexpr int32_t kVocabulary = 4096;

// In f32, on one rank.
uint64_t planned_bytes(bool training, int32_t loss_chunk_tokens) {
  ModelConfig model = model_of(2, /*tied=*/false);
  model.vocab_size = kVocabulary;
  LayoutCase alone;
  alone.model = model;
  const ModelState state =
      declare_model_state(model, DType::f32, training, {.run = run_layout_of(alone), .rank = 0});
  std::unique_ptr<Program> program =
      training
          ? build_training_step(
                model, state,
                {.micro_batches = 2, .sequence = kSequence, .loss_chunk_tokens = loss_chunk_tokens})
                .program
          : build_evaluation_step(model, state, 1, kSequence, loss_chunk_tokens).program;
  verify_program(*program);
  const MemoryPlan plan = plan_memory(*program, 1);
  verify_memory_plan(*program, plan);
  return plan.total_bytes();
}

// All but one of four chunks of the logits are saved. Where memory is fullest there is nothing else
// that would be larger; the chunks of the head's input and of its gradient are there instead.
TEST(LossChunksMemory, OneChunkOfLogitsIsThereAtATime) {
  constexpr uint64_t kLogits = uint64_t{kSequence} * kVocabulary * sizeof(float);
  for (const bool training : {true, false}) {
    SCOPED_TRACE(training ? "training" : "evaluation");
    const uint64_t whole = planned_bytes(training, 0);
    EXPECT_EQ(planned_bytes(training, kSequence), whole) << "one chunk is no chunk";
    EXPECT_LE(planned_bytes(training, kSequence / 4), whole - kLogits * 5 / 8);
  }
}

}  // namespace
}  // namespace troupe::testing
