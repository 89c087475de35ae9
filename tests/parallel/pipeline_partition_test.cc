// Stages: even cuts, the layout text, and its refusals.
#include "parallel/pipeline_partition.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "base/error.h"
#include "options/refusals.h"

namespace troupe {
namespace {

PipelinePartition parse(std::string_view text, int32_t layers, int32_t ranks,
                        int32_t mtp_layers = 0) {
  return parse_partition(text, layers, mtp_layers, ranks, StagePlacement::loop).value();
}

// Interleaved stages: chunk v of rank r holds the layers from v (L / V) + r (L / PP / V) on.
TEST(PipelinePartition, EvenStagesFollowTheFormula) {
  const int32_t layers = 24;
  for (const int32_t ranks : {1, 2, 4}) {
    for (const int32_t chunks : {1, 2, 3}) {
      const PipelinePartition partition =
          even_partition(layers, ranks, chunks, StagePlacement::loop).value();
      ASSERT_EQ(partition.stages.size(), static_cast<size_t>(ranks * chunks));
      for (int32_t stage = 0; stage < ranks * chunks; ++stage) {
        const StagePlace place = partition.place_of(stage);
        const PipelineStage& held = partition.stages[static_cast<size_t>(stage)];
        EXPECT_EQ(held.layers, layers / ranks / chunks);
        EXPECT_EQ(held.first_layer,
                  place.chunk * (layers / chunks) + place.rank * (layers / ranks / chunks));
        EXPECT_EQ(held.embedding, stage == 0);
        EXPECT_EQ(held.loss, stage + 1 == ranks * chunks);
        EXPECT_EQ(partition.rank_of_layer(held.first_layer), place.rank);
      }
    }
  }
}

TEST(PipelinePartition, VGoesDownAndUpAgain) {
  const PipelinePartition partition = even_partition(6, 3, 2, StagePlacement::v).value();
  std::vector<int32_t> ranks;
  for (int32_t stage = 0; stage < 6; ++stage) {
    ranks.push_back(partition.place_of(stage).rank);
    EXPECT_EQ(stage_at(StagePlacement::v, 3, partition.place_of(stage)), stage);
  }
  EXPECT_EQ(ranks, (std::vector<int32_t>{0, 1, 2, 2, 1, 0}));
  EXPECT_EQ(partition.embedding_ranks(/*tied=*/true), (std::vector<int32_t>{0}));
}

// The example of docs/layouts.md: 32 stages on 16 ranks, MTP on rank 14, loss alone on rank 15.
TEST(PipelinePartition, ReadsTheExampleWithMtp) {
  const PipelinePartition partition = parse("Et*3|(tt|)*29,m|L", 61, 16, 1);
  ASSERT_EQ(partition.stages.size(), 32U);
  EXPECT_EQ(partition.chunks, 2);
  EXPECT_EQ(partition.stages[0].layers, 3);
  EXPECT_TRUE(partition.stages[0].embedding);
  for (size_t stage = 1; stage < 30; ++stage) {
    EXPECT_EQ(partition.stages[stage].layers, 2) << "stage " << stage;
    EXPECT_EQ(partition.stages[stage].first_layer, 3 + 2 * static_cast<int32_t>(stage - 1));
  }
  EXPECT_EQ(partition.stages[30].mtp_layers, 1);
  EXPECT_EQ(partition.place_of(30), (StagePlace{14, 1}));
  EXPECT_EQ(partition.stages[31],
            (PipelineStage{.first_layer = 61, .first_mtp_layer = 1, .loss = true}));
  EXPECT_EQ(partition.place_of(31), (StagePlace{15, 1}));
  EXPECT_EQ(partition.rank_of_layer(60), 13);
  EXPECT_EQ(partition.rank_of_layer(61), 14);
  EXPECT_EQ(partition.streams_into(30), 1);
  EXPECT_EQ(partition.streams_into(31), 2);
  EXPECT_EQ(partition.embedding_ranks(/*tied=*/false), (std::vector<int32_t>{0, 14}));
  EXPECT_EQ(partition.embedding_ranks(/*tied=*/true), (std::vector<int32_t>{0, 14, 15}));
}

TEST(PipelinePartition, EmptyStagesBlanksAndNestedRepetitions) {
  const PipelinePartition partition = parse("E | ((t,|)*2 t*2|)*1 | L", 4, 3);
  EXPECT_EQ(to_text(partition), "E|t|t|t*2||L");
  EXPECT_EQ(partition.stages[4].layers, 0);
  EXPECT_EQ(parse(to_text(partition), 4, 3).stages, partition.stages)
      << "the text written from a partition reads as that partition";
  EXPECT_EQ(parse("Et*0tL", 1, 1).stages.size(), 1U);
}

// Also on the first rank, in any chunk, and with stages between them.
TEST(PipelinePartition, MtpMayStandInSeveralStages) {
  const PipelinePartition partition = parse("Ett|tm||m|mm|L", 3, 3, 4);
  EXPECT_EQ(partition.chunks, 2);
  EXPECT_EQ(partition.stages[1], (PipelineStage{.first_layer = 2, .layers = 1, .mtp_layers = 1}));
  EXPECT_EQ(partition.stages[2], (PipelineStage{.first_layer = 3, .first_mtp_layer = 1}));
  EXPECT_EQ(partition.stages[4],
            (PipelineStage{.first_layer = 3, .first_mtp_layer = 2, .mtp_layers = 2}));
  EXPECT_EQ(partition.stages[5],
            (PipelineStage{.first_layer = 3, .first_mtp_layer = 4, .loss = true}));
  std::vector<int32_t> streams;
  for (int32_t stage = 1; stage < 6; ++stage) streams.push_back(partition.streams_into(stage));
  EXPECT_EQ(streams, (std::vector<int32_t>{1, 2, 2, 3, 5}));
  std::vector<int32_t> ranks;
  for (int32_t layer = 0; layer < 7; ++layer) ranks.push_back(partition.rank_of_layer(layer));
  EXPECT_EQ(ranks, (std::vector<int32_t>{0, 0, 1, 1, 0, 1, 1}));
  EXPECT_EQ(partition.rank_of_final_norm(), 1);
  EXPECT_EQ(partition.rank_of_loss(), 2);
  EXPECT_EQ(partition.mtp_ranks(), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(partition.embedding_ranks(/*tied=*/false), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(partition.embedding_ranks(/*tied=*/true), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(to_text(partition), "Et*2|tm||m|m*2|L");
}

// Where stages go down the ranks and up again, the first rank has the last one, too.
TEST(PipelinePartition, MtpMayStandWithTheLossOfAV) {
  const PipelinePartition partition =
      parse_partition("Et|t|t|mmL", 3, 2, 2, StagePlacement::v).value();
  EXPECT_EQ(partition.rank_of_layer(4), 0);
  EXPECT_EQ(partition.embedding_ranks(/*tied=*/false), (std::vector<int32_t>{0}));
}

void expect_refused(std::string_view text, int32_t layers, int32_t ranks, const std::string& phrase,
                    int32_t mtp_layers = 0, StagePlacement placement = StagePlacement::loop) {
  const auto answer = parse_partition(text, layers, mtp_layers, ranks, placement);
  ASSERT_NE(answer.refusal(), nullptr) << text << " was accepted";
  EXPECT_EQ(answer.refusal()->setting, Setting::pipeline_layout);
  const std::string message = text_of(*answer.refusal());
  EXPECT_NE(message.find(phrase), std::string::npos) << "'" << phrase << "' is not in: " << message;
  EXPECT_EQ(message.find("--pipeline-model-parallel-layout "), 0U) << message;
}

TEST(PipelinePartition, RefusesTextsThatMeanNothing) {
  expect_refused("Etx|tL", 2, 2, "at character 3: 'x' means nothing here");
  expect_refused("E(tt|tL", 3, 2, "at character 2: this '(' is not closed");
  expect_refused("Et)|tL", 2, 2, "at character 3: ')' closes no '('");
  expect_refused("Et|tL)", 2, 2, "at character 6: ')' closes no '('");
  expect_refused("Et*|tL", 2, 2, "a number must follow '*'");
  expect_refused("*3", 2, 2, "at character 1: '*' means nothing here");
  expect_refused("Et*99999999999L", 2, 1, "the number is too large");
  expect_refused("E((t*1000)*1000)*1000L", 2, 1, "more than 100000 symbols");
  expect_refused("E(t*1000)*60(t*1000)*60L", 2, 1, "more than 100000 symbols");
  expect_refused(std::string(100, '('), 2, 1, "too many '('");
  expect_refused("", 2, 1, "E (embedding) must stand once");
}

TEST(PipelinePartition, RefusesStagesThatBreakARule) {
  expect_refused("t|tL", 2, 2, "E (embedding) must stand once");
  expect_refused("t|EtL", 2, 2, "at the very beginning");
  expect_refused("EEt|tL", 2, 2, "it stands 2 times");
  expect_refused("EtL|t", 2, 2, "L (loss) must stand once, at the very end");
  expect_refused("Et|t", 2, 2, "it stands 0 times");
  expect_refused("Et|tL", 3, 2, "2 decoder layers (t), the model has 3");
  expect_refused("Et|tmL", 2, 2, "1 MTP layers (m), the model has 0");
  expect_refused("Et|t|tL", 3, 2, "3 stages, which is not a multiple of");
  expect_refused("Et|t|t|tL", 4, 3, "Nearest sizes: 2 or 4; or add 2 empty stages");
  expect_refused("Et|m|tL", 2, 3, "must come after all decoder layers", 1);
  expect_refused("Ett|m|L|", 2, 2, "at the very end", 1);
  expect_refused("Ett|mL|m", 2, 3, "at the very end", 2);
  expect_refused("Etm|tmL", 2, 2, "must come after all decoder layers", 2);
  expect_refused("Et|tL", 2, 2, "zb-v places two on each rank", 0, StagePlacement::v);
}

TEST(PipelinePartition, EvenCutsNameTheNearestSizes) {
  const auto answer = even_partition(12, 5, 1, StagePlacement::loop);
  ASSERT_NE(answer.refusal(), nullptr) << "12 layers cannot be cut into 5 equal stages";
  EXPECT_EQ(answer.refusal()->setting, Setting::pipeline_parallel);
  EXPECT_EQ(answer.refusal()->nearest, (std::vector<int64_t>{4, 6}));
  EXPECT_EQ(text_of(*answer.refusal()),
            "--pipeline-model-parallel-size 5: 12 layers cannot be cut into 5 x 1 = 5 equal stages "
            "(ranks of the pipeline x stages of each). Nearest sizes: 4 or 6; or "
            "--pipeline-model-parallel-layout cuts them unevenly.");
}

}  // namespace
}  // namespace troupe
