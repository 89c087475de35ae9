// What multi-token prediction gets to see of a sample: tokens, labels and masks further along it.
// And where documents begin, as attention and gated delta nets count.
#include "train/batch_feed.h"

#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "data/data_test_support.h"
#include "passes/memory_plan.h"
#include "program/builder.h"
#include "runtime/make_interpreter.h"
#include "train/train_test_support.h"

namespace troupe::testing {
namespace {

constexpr int32_t kSequence = 12;
constexpr int32_t kEod = 95;  // the last id of the model

class BatchFeedTest : public ::testing::TestWithParam<bool> {
 protected:
  // Documents of 3, 1 and 6 tokens with their ends, over and over.
  BatchFeedTest() {
    int32_t next = 0;
    std::vector<std::vector<int32_t>> documents;
    for (int i = 0; i < 12; ++i) {
      std::vector<int32_t>& document = documents.emplace_back();
      for (int32_t left = i % 3 == 0 ? 3 : i % 3 == 1 ? 1 : 6; left > 0; --left) {
        document.push_back(next++ % kEod);
      }
      document.push_back(kEod);
    }
    write_dataset(folder_ / "set", documents);
    const auto data = std::make_shared<IndexedDataset>(folder_ / "set");
    SampleOptions options;
    options.sequence_length = kSequence;
    options.vocab_size = kEod + 1;
    options.eod = kEod;
    options.eod_mask_loss = true;
    options.reset_attention_mask = GetParam();
    source_ = std::make_unique<SampleSource>(
        std::vector<SourceMember>{{.dataset = data, .sequences = {0, data->num_sequences()}}},
        std::vector<double>{}, options);
  }

  TempFolder folder_;
  std::unique_ptr<SampleSource> source_;
};

TEST_P(BatchFeedTest, ShiftsWithinTheSampleOrTheDocument) {
  ModelConfig config = dense_model(1);
  config.mtp_num_layers = 3;
  const StepRun run(config, {.micro_batch_size = 2, .sequence = kSequence, .change = [](auto& o) {
                               o.reset_attention_mask = GetParam();
                             }});
  const BatchValues& batch = run.step.micro_batches.front();
  BatchFeed feed(*source_);
  feed.write(run.interpreter, batch, 1);
  const auto integers = [&](ValueId id) {
    const auto* const data = run.interpreter.view(id).as<int32_t>();
    return std::vector<int32_t>(data, data + 2 * kSequence);
  };
  const std::vector<int32_t> tokens = integers(batch.tokens);
  const std::vector<int32_t> labels = integers(batch.labels);
  const std::vector<double> mask = elements(run.interpreter.view(batch.mask));
  ASSERT_EQ(batch.shifted.size(), 3U);
  for (size_t depth = 1; depth <= 3; ++depth) {
    const BatchValues::Shifted& further = batch.shifted[depth - 1];
    const std::vector<int32_t> own_tokens = integers(further.tokens);
    const std::vector<int32_t> own_labels = integers(further.labels);
    const std::vector<double> own_mask = elements(run.interpreter.view(further.mask));
    bool any = false;
    for (size_t at = 0; at < tokens.size(); ++at) {
      const size_t there = at + depth;
      bool exists = there / kSequence == at / kSequence;
      for (size_t i = at; GetParam() && i < there; ++i) exists = exists && tokens[i] != kEod;
      SCOPED_TRACE(::testing::Message() << "depth " << depth << " row " << at);
      EXPECT_EQ(own_tokens[at], exists ? tokens[there] : 0);
      EXPECT_EQ(own_labels[at], exists ? labels[there] : 0);
      EXPECT_EQ(own_mask[at], exists ? mask[there] : 0);
      any = any || exists;
    }
    EXPECT_TRUE(any);
  }
}

// Of four chunks of three tokens the rank has the second and the third.
TEST_P(BatchFeedTest, CountsBeginningsFromChunks) {
  const auto table = std::make_shared<const StateTable>();
  Program program(table);
  Builder builder(program);
  const SequenceChunks chunks{.ranks = 2, .rank = 1};
  constexpr int32_t kRows = kSequence / 2;
  const auto input = [&](int64_t rows) { return builder.input("starts", DType::i32, {2 * rows}); };
  BatchValues batch;
  batch.batch = 2;
  batch.sequence = kRows;
  batch.chunks = chunks;
  batch.starts = input(kSequence);
  batch.delta_starts = input(kRows);
  batch.delta_chunks = chunks;
  const StateStorage storage(table);
  ThreadPool pool(1);
  const auto interpreter = make_interpreter(program, plan_memory(program, 1), storage, pool);
  BatchFeed(*source_).write(*interpreter, batch, 1);
  const auto* const whole = interpreter->view(batch.starts).as<int32_t>();
  const auto* const own = interpreter->view(batch.delta_starts).as<int32_t>();
  for (int32_t sequence = 0; sequence < 2; ++sequence) {
    for (int32_t row = 0; row < kRows; ++row) {
      const int32_t start = whole[sequence * kSequence + 3 + row];
      EXPECT_EQ(own[sequence * kRows + row], start - (row < 3 ? 3 : 6)) << sequence << " " << row;
    }
    EXPECT_EQ(whole[sequence * kSequence + kSequence - 1] > 0, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Documents, BatchFeedTest, ::testing::Bool());

}  // namespace
}  // namespace troupe::testing
