// The memory of pipelines: what one micro-batch leaves for its backward pass lies in slots that the
// micro-batches of a stage take in turn.
#include <gtest/gtest.h>
#include <memory>
#include <string>

#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "program/test_models.h"
#include "program/verify.h"

namespace troupe {
namespace {

using namespace testing;

struct PlanCase {
  const char* name;
  ModelConfig config;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int32_t ranks = 4;
  int32_t chunks = 1;
  DType dtype = DType::f32;
};

// Keeps GoogleTest from printing a case's bytes.
void PrintTo(const PlanCase& c, std::ostream* out) {
  *out << c.name;
}

class PipelinePlan : public ::testing::TestWithParam<PlanCase> {
 protected:
  struct Planned {
    ModelState state;
    TrainingStep step;
    MemoryPlan plan;
  };

  static Planned plan(int32_t rank, int32_t micro_batches, Device device = Device::cpu) {
    const PlanCase& c = GetParam();
    const PipelineShape shape{.schedule = c.schedule,
                              .ranks = c.ranks,
                              .chunks = c.chunks,
                              .micro_batches = micro_batches};
    PipelinePartition partition =
        even_partition(c.config.num_layers, c.ranks, c.chunks, shape.placement()).value();
    LayoutOptions options;
    options.world_size = options.pipeline_parallel = c.ranks;
    options.embedding_places = partition.embedding_ranks(c.config.tie_embeddings);
    const ModelPart part{
        std::make_shared<const RunLayout>(RunLayout{Layout(options), std::move(partition), shape}),
        rank};
    Planned planned;
    planned.state = declare_model_state(c.config, c.dtype, /*trained=*/true, part);
    planned.step = build_training_step(c.config, planned.state,
                                       {.micro_batches = micro_batches, .sequence = 64});
    verify_program(*planned.step.program);
    planned.plan = plan_memory(*planned.step.program, 1, device);
    verify_memory_plan(*planned.step.program, planned.plan);
    return planned;
  }
};

// Bundles cannot be cut up. Where stages of different sizes take turns on one rank a hole may stay
// open, and of a stage with a single layer much dies early in its backward pass: up to a quarter
// above what must be live. Otherwise it is a tenth.
TEST_P(PipelinePlan, WastesLittle) {
  const bool one_stage_of_many_layers =
      GetParam().chunks == 1 && GetParam().config.num_layers > GetParam().ranks;
  for (int32_t rank = 0; rank < GetParam().ranks; ++rank) {
    const Planned planned = plan(rank, 16);
    EXPECT_LE(static_cast<double>(planned.plan.transient_bytes),
              (one_stage_of_many_layers ? 1.10 : 1.25) *
                  static_cast<double>(planned.plan.largest_live_bytes))
        << "rank " << rank;
  }
}

TEST_P(PipelinePlan, DoesNotGrowWithTheMicroBatches) {
  for (int32_t rank = 0; rank < GetParam().ranks; ++rank) {
    const uint64_t bytes = plan(rank, 16).plan.transient_bytes;
    EXPECT_EQ(plan(rank, 32).plan.transient_bytes, bytes) << "rank " << rank;
    EXPECT_EQ(plan(rank, 64).plan.transient_bytes, bytes) << "rank " << rank;
  }
}

// On a GPU what messages touch is kept a little longer.
TEST_P(PipelinePlan, DoesNotGrowWithTheMicroBatchesOnAGpu) {
  for (int32_t rank = 0; rank < GetParam().ranks; ++rank) {
    const uint64_t bytes = plan(rank, 16, Device::cuda).plan.transient_bytes;
    EXPECT_EQ(plan(rank, 32, Device::cuda).plan.transient_bytes, bytes) << "rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, PipelinePlan,
    ::testing::Values(
        PlanCase{"one_f_one_b", mixtral_like_model(16)},
        PlanCase{"one_f_one_b_bf16", mixtral_like_model(16), PipelineSchedule::one_f_one_b, 4, 1,
                 DType::bf16},
        PlanCase{"dense", dense_model(16)}, PlanCase{"single_layers", dense_model(4)},
        PlanCase{"single_layers_bf16", dense_model(4), PipelineSchedule::one_f_one_b, 4, 1,
                 DType::bf16},
        PlanCase{"interleaved", mixtral_like_model(16), PipelineSchedule::one_f_one_b, 4, 2},
        PlanCase{"interleaved_4", dense_model(16), PipelineSchedule::one_f_one_b, 4, 4},
        PlanCase{"zb_h1", mixtral_like_model(16), PipelineSchedule::zb_h1},
        PlanCase{"zb_v", mixtral_like_model(16), PipelineSchedule::zb_v, 4, 2}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace troupe
