// What multi-token prediction gets to see of a sample: tokens, labels and masks further along it.
#include "train/batch_feed.h"

#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "data/data_test_support.h"
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

INSTANTIATE_TEST_SUITE_P(Documents, BatchFeedTest, ::testing::Bool());

}  // namespace
}  // namespace troupe::testing
