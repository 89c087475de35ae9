// Random micro-batches: every input of the ranks that share sequences, value by value, against a
// batch of one rank, and that against its formula.
#include "train/random_batch.h"

#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "base/random.h"
#include "passes/memory_plan.h"
#include "program/builder.h"
#include "runtime/make_interpreter.h"
#include "train_test_support.h"

namespace troupe::testing {
namespace {

constexpr int32_t kSequences = 2;
constexpr int32_t kTokens = 1200;  // of each: two documents of 512 and the rest
constexpr int32_t kVocabulary = 300;

// What the inputs of a rank hold, each of its rows at its place in the whole micro-batch.
struct WrittenBatch {
  std::vector<double> tokens, labels, mask, valid, starts, delta_starts;
  std::vector<double> next_tokens, next_labels, next_mask, next_valid;
};

WrittenBatch write_batch(int64_t number, const SequenceChunks& chunks, DType accumulation) {
  const auto table = std::make_shared<const StateTable>();
  Program program(table);
  Builder builder(program);
  const int32_t sequence = kTokens / chunks.ranks;
  const int64_t rows = int64_t{kSequences} * sequence;
  const auto ids = [&](const char* name) { return builder.input(name, DType::i32, {rows}); };
  const auto weights = [&](const char* name) { return builder.input(name, accumulation, {rows}); };
  BatchValues batch;
  batch.batch = kSequences;
  batch.sequence = sequence;
  batch.chunks = chunks;
  batch.tokens = ids("tokens");
  batch.labels = ids("labels");
  batch.mask = weights("mask");
  batch.valid.mask = ids("valid");
  batch.starts = ids("starts");
  batch.starts_chunks = chunks;
  batch.delta_starts = ids("delta_starts");
  batch.delta_chunks = chunks;
  BatchValues::Shifted further;
  further.tokens = ids("next tokens");
  further.labels = ids("next labels");
  further.mask = weights("next mask");
  further.valid.mask = ids("next valid");
  batch.shifted = {further};
  const StateStorage storage(table);
  ThreadPool pool(1);
  const auto interpreter = make_interpreter(program, plan_memory(program, 1), storage, pool);
  write_random_batch(*interpreter, batch, number, kVocabulary);

  const auto read = [&](ValueId id) {
    const TensorView view = interpreter->view(id);
    std::vector<double> all(static_cast<size_t>(kSequences * kTokens), -1);
    for (int64_t i = 0; i < view.shape[0]; ++i) {
      const int64_t at = i / sequence * kTokens + chunks.position(i % sequence, sequence);
      all[static_cast<size_t>(at)] =
          view.dtype == DType::i32 ? view.as<int32_t>()[i] : element(view, i);
    }
    return all;
  };
  const BatchValues::Shifted& next = batch.shifted.front();
  return {.tokens = read(batch.tokens),
          .labels = read(batch.labels),
          .mask = read(batch.mask),
          .valid = read(batch.valid.mask),
          .starts = read(batch.starts),
          .delta_starts = read(batch.delta_starts),
          .next_tokens = read(next.tokens),
          .next_labels = read(next.labels),
          .next_mask = read(next.mask),
          .next_valid = read(next.valid.mask)};
}

TEST(RandomBatch, IsWhatItsNumberSays) {
  for (const DType accumulation : {DType::f32, DType::f64}) {
    const WrittenBatch found = write_batch(3, {}, accumulation);
    for (int64_t i = 0; i < kSequences * kTokens; ++i) {
      const auto at = static_cast<size_t>(i);
      const auto drawn = [&](uint32_t what) {
        return random_below(kVocabulary, 1, RandomStream::test, what,
                            static_cast<uint64_t>(3 * kSequences * kTokens + i));
      };
      ASSERT_EQ(found.tokens[at], drawn(0)) << i;
      ASSERT_EQ(found.labels[at], drawn(1)) << i;
      ASSERT_EQ(found.starts[at], i % kTokens / 512 * 512) << i;
    }
    const std::vector<double> ones(static_cast<size_t>(kSequences * kTokens), 1);
    for (const auto* mask : {&found.mask, &found.valid, &found.next_mask, &found.next_valid}) {
      EXPECT_EQ(*mask, ones);
    }
    EXPECT_EQ(found.delta_starts, found.starts);
    EXPECT_EQ(found.next_tokens, found.tokens);
    EXPECT_EQ(found.next_labels, found.labels);
  }
}

TEST(RandomBatch, IsSharedByRanks) {
  const WrittenBatch whole = write_batch(1, {}, DType::f32);
  const WrittenBatch of[] = {write_batch(1, {.ranks = 2, .rank = 0}, DType::f32),
                             write_batch(1, {.ranks = 2, .rank = 1}, DType::f32)};
  for (std::vector<double> WrittenBatch::*part :
       {&WrittenBatch::tokens, &WrittenBatch::labels, &WrittenBatch::mask, &WrittenBatch::valid,
        &WrittenBatch::starts, &WrittenBatch::next_tokens, &WrittenBatch::next_labels,
        &WrittenBatch::next_mask, &WrittenBatch::next_valid}) {
    std::vector<double> joined = of[0].*part;
    for (size_t i = 0; i < joined.size(); ++i) {
      EXPECT_NE(joined[i] < 0, (of[1].*part)[i] < 0) << "each row is one rank's";
      if (joined[i] < 0) joined[i] = (of[1].*part)[i];
    }
    EXPECT_EQ(joined, whole.*part);
  }
  // Of four chunks of 300 tokens the second begins within the first document, the fourth within the
  // second.
  const auto beginning = [&](int32_t rank, size_t row) { return of[rank].delta_starts[row]; };
  EXPECT_EQ(beginning(0, 0), 0);
  EXPECT_EQ(beginning(1, 300), -300);
  EXPECT_EQ(beginning(1, 512), 212);
  EXPECT_EQ(beginning(1, 600), -88);
  EXPECT_EQ(beginning(0, 900), -388);
  EXPECT_EQ(beginning(0, 1024), 124);
}

}  // namespace
}  // namespace troupe::testing
