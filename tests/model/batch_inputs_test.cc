// What a rank's program is given of a micro-batch: tokens, labels, where documents begin and which
// tokens are none, each where the rank has what reads it, and with as many rows as it has.
#include "model/batch_inputs.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "program/test_models.h"

namespace troupe::testing {
namespace {

constexpr int32_t kBatch = 2;
constexpr int32_t kSequence = 8;

// Layers 0 and 1 with gated delta nets, the others with attention; of multi-token prediction one,
// which is as the last.
ModelConfig model_of_kinds(std::vector<bool> moe_layers) {
  ModelConfig config = moe_model(4);
  config.moe_layers = std::move(moe_layers);
  config.linear_attention_layers = {true, true, false, false};
  config.mtp_num_layers = 1;
  return config;
}

// The inputs of the pipeline's rank that has this stage, "NAME ROWS" each.
std::string inputs_of(const ModelConfig& config, int32_t stage, bool with_labels = true,
                      int32_t cp = 1) {
  LayoutOptions options;
  options.world_size = 4 * cp;
  options.pipeline_parallel = 4;
  options.context_parallel = cp;
  const Layout layout(options);
  PipelinePartition partition;
  partition.ranks = 4;
  partition.stages = {{.first_layer = 0, .layers = 2, .embedding = true},
                      {.first_layer = 2, .layers = 2},
                      {.first_layer = 4, .mtp_layers = 1},
                      {.first_layer = 4, .first_mtp_layer = 1, .loss = true}};
  const ModelPart part{.run = std::make_shared<const RunLayout>(RunLayout{layout, partition, {}}),
                       .rank = layout.rank_of(DensePlace{.pp = stage})};
  Program program(std::make_shared<StateTable>());
  Builder builder(program);
  BatchValues batch = declare_batch_of(builder, part, kBatch, kSequence, with_labels, DType::f32);
  declare_shifted(builder, config, part, DType::f32, batch);
  declare_starts(builder, config, part, ContextExchange::allgather, batch);
  declare_valid_tokens(builder, config, part, int64_t{kBatch} * batch.sequence, batch);
  std::string text;
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    if (value.role != Role::input) continue;
    text += (text.empty() ? "" : ", ") + value.name + " " + std::to_string(value.shape[0]);
  }
  return text;
}

TEST(BatchInputs, AreThoseThatTheStageReads) {
  const ModelConfig config = model_of_kinds({false, false, false, true});
  EXPECT_EQ(inputs_of(config, 0), "tokens 16, delta_starts 16");
  EXPECT_EQ(inputs_of(config, 1), "starts 16, valid 16");
  EXPECT_EQ(inputs_of(config, 2), "tokens 16, starts 16, valid 16");
  EXPECT_EQ(inputs_of(config, 3), "labels 16, mask 16, labels 16, mask 16");
  EXPECT_EQ(inputs_of(config, 3, /*with_labels=*/false), "");
}

// Routers of other layers are not the rank's; those of the prediction's layer are the last one's.
TEST(BatchInputs, HaveAMaskOfPaddingWhereThereAreRouters) {
  const ModelConfig config = model_of_kinds({true, false, true, false});
  EXPECT_EQ(inputs_of(config, 0), "tokens 16, delta_starts 16, valid 16");
  EXPECT_EQ(inputs_of(config, 1), "starts 16, valid 16");
  EXPECT_EQ(inputs_of(config, 2), "tokens 16, starts 16");
}

// A rank has half of each sequence; delta nets read all of it where their heads are shared.
TEST(BatchInputs, AreTheRanksPartOfEachSequence) {
  ModelConfig config = model_of_kinds({false, false, false, true});
  config.linear_num_key_heads = 4;
  EXPECT_EQ(inputs_of(config, 0, /*with_labels=*/true, 2), "tokens 8, delta_starts 16");
  EXPECT_EQ(inputs_of(config, 1, /*with_labels=*/true, 2), "starts 8, valid 8");
  config.linear_num_key_heads = 3;
  EXPECT_EQ(inputs_of(config, 0, /*with_labels=*/true, 2), "tokens 8, delta_starts 8");
}

}  // namespace
}  // namespace troupe::testing
