// Passes move operations and change nothing else: without any one of them, and without all, steps
// in every schedule, with a loss in chunks, messages and products in 8 bits, recompute, offload,
// sharded parameters and overlap, leave the bits that they leave with them. (Precision changes
// numbers, and is not left out.)
#include "passes/pass_pipeline.h"

#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "passes/step_programs.h"
#include "program/verify.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

ModelConfig skip_model(int32_t layers) {
  ModelConfig model = auxiliary_loss_models(moe_model(layers))[2].config;
  model.num_query_groups = 4;
  model.num_experts = 8;
  model.moe_shared_expert_intermediate_size = 32;
  model.hidden_dropout = model.attention_dropout = 0.1;
  return model;
}

std::vector<LayoutCase> skip_cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const std::string& name, int32_t layers, int32_t ranks,
                       const auto& configure) {
    LayoutCase c;
    c.name = name;
    c.model = skip_model(layers);
    c.layout.world_size = ranks;
    c.layout.expert_parallel = 2;
    c.layout.expert_tensor_parallel = 1;
    c.micro_batches = 2;
    c.sequence = 16;
    c.dispatcher = TokenDispatcher::alltoall;
    c.early_collectives = true;
    c.loss_chunk_tokens = 5;
    c.precision = {.recipe = Fp8Recipe::mxfp8,
                   .messages = {.dispatched = true, .combine_gradients = true}};
    c.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                   .modules = {&kCoreAttentionModule, &kNormModule}};
    c.offload = {.modules = {&kQkvModule, &kCoreAttentionModule, &kExpertFc1Module},
                 .least_elements = 1};
    c.stash = {.factor = 8, .page_bytes = 256};
    configure(c);
    c.overlap.multiprocessors = 8;
    all.push_back(c);
  };
  add("sharded_and_merged", 3, 4, [](LayoutCase& c) {
    c.sharding = StateSharding::parameters;
    c.merged = true;
    c.overlap = {.delay_weight_gradients = true, .shared_expert = true};
  });
  add("interleaved", 4, 4, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.chunks = 2;
    c.sharding = StateSharding::optimizer;
    c.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                   .modules = {&kMoeModule}};
    c.overlap = {.shared_expert = true};
  });
  add("zb_v", 4, 4, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.chunks = 2;
    c.schedule = PipelineSchedule::zb_v;
    c.micro_batches = 4;
  });
  return all;
}

class SkippedPasses : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(SkippedPasses, ChangeNoBit) {
  LayoutCase c = GetParam();
  const Outcome with_all = run_layout(c);
  std::vector<PassId> passes;
  for (const PassInfo& pass : all_passes()) {
    if (pass.id == PassId::emission || pass.id == PassId::precision) continue;
    SCOPED_TRACE(pass.name);
    passes.push_back(pass.id);
    c.skipped_passes = {pass.id};
    expect_same_bits(with_all, run_layout(c));
  }
  SCOPED_TRACE("all");
  c.skipped_passes = passes;
  expect_same_bits(with_all, run_layout(c));
}

INSTANTIATE_TEST_SUITE_P(Layouts, SkippedPasses, ::testing::ValuesIn(skip_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(PassPipeline, IsWatchedPassByPass) {
  std::set<PassId> moves;
  std::set<PassId> adds;
  for (const LayoutCase& each : skip_cases()) {
    SCOPED_TRACE(each.name);
    std::vector<PassRecord> records;
    const auto watch = [&](const PassRecord& record, const Program& program) {
      verify_program(program);
      EXPECT_EQ(record.ops_after, program.op_count()) << name_of(record.id);
      records.push_back(record);
    };
    const std::unique_ptr<const Program> program = program_of(each, /*rank=*/0, watch);
    ASSERT_EQ(records.size(), all_passes().size());
    for (size_t i = 0; i < records.size(); ++i) {
      EXPECT_EQ(records[i].id, all_passes()[i].id);
      if (i == 0) continue;
      EXPECT_EQ(records[i].ops_before, records[i - 1].ops_after) << name_of(records[i].id);
      if (records[i].ops_moved > 0) moves.insert(records[i].id);
      EXPECT_GE(records[i].ops_after, records[i].ops_before) << name_of(records[i].id);
      if (records[i].ops_after > records[i].ops_before) adds.insert(records[i].id);
    }
    EXPECT_EQ(records.back().ops_after, program->op_count());
  }
  EXPECT_EQ(adds, (std::set<PassId>{PassId::messages, PassId::precision, PassId::recompute,
                                    PassId::offload, PassId::stash}));
  // What came after an operation that was replaced.
  moves.erase(PassId::messages);
  moves.erase(PassId::precision);
  // Neither do emission, which begins the program, and multiprocessors, which only says how many
  // an operation takes.
  EXPECT_EQ(moves.size() + adds.size(), all_passes().size() - 2)
      << "each other pass adds or moves something in some case, and none does both";
}

}  // namespace
}  // namespace troupe::testing
