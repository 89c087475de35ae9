#include "data/sampler.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <numeric>
#include <thread>

#include "data/data_test_support.h"

namespace troupe {
namespace {

constexpr int32_t kEod = 60000;

// Documents of assorted lengths (one of them empty) in which every token is a different id, so that
// a token tells its place; each ends with kEod when `with_eod`.
std::vector<std::vector<int32_t>> make_documents(int count, bool with_eod = false) {
  std::vector<std::vector<int32_t>> documents;
  int32_t next = 0;
  for (int i = 0; i < count; ++i) {
    std::vector<int32_t> document(static_cast<size_t>(i * 5 % 11));
    for (int32_t& token : document) token = next++;
    if (with_eod) document.push_back(kEod);
    documents.push_back(document);
  }
  return documents;
}

struct Sample {
  std::vector<int32_t> tokens, labels;
  std::vector<float> mask;

  explicit Sample(int64_t length)
      : tokens(static_cast<size_t>(length)), labels(tokens.size()), mask(tokens.size()) {}
  bool operator==(const Sample&) const = default;
};

Sample sample_of(const SampleSource& source, int64_t i) {
  Sample sample(source.options().sequence_length);
  source.get(i, sample.tokens, sample.labels, sample.mask);
  return sample;
}

class SamplerTest : public testing::Test {
 protected:
  void write(const std::vector<std::vector<int32_t>>& documents) {
    documents_ = documents;
    write_dataset(dir_ / "set", documents);
    dataset_ = std::make_shared<IndexedDataset>(dir_ / "set");
  }

  SampleOptions options(int64_t length, uint64_t seed) const {
    SampleOptions options;
    options.sequences = {0, dataset_->num_sequences()};
    options.sequence_length = length;
    options.seed = seed;
    options.vocab_size = kEod + 1;
    options.eod = kEod;
    return options;
  }

  // The documents in this order, joined.
  std::vector<int32_t> join(const std::vector<int64_t>& order) const {
    std::vector<int32_t> stream;
    for (const int64_t i : order) {
      const auto& document = documents_[static_cast<size_t>(i)];
      stream.insert(stream.end(), document.begin(), document.end());
    }
    return stream;
  }

  TempDir dir_;
  std::vector<std::vector<int32_t>> documents_;
  std::shared_ptr<IndexedDataset> dataset_;
};

std::vector<int64_t> entries(const Permutation& permutation) {
  std::vector<int64_t> images(static_cast<size_t>(permutation.size()));
  for (int64_t i = 0; i < permutation.size(); ++i) images[static_cast<size_t>(i)] = permutation(i);
  return images;
}

TEST(Permutation, HitsEveryElementOnce) {
  for (const int64_t size : {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097}) {
    SCOPED_TRACE(size);
    auto images = entries(Permutation(size, 42, 3, ShuffleDomain::samples));
    std::sort(images.begin(), images.end());
    std::vector<int64_t> all(images.size());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(images, all);
  }
}

// Computed by a separate implementation of docs/data_format.md in another language. These values
// are part of what a seed means: a run resumed after they changed would see other data.
TEST(Permutation, ValuesNeverChange) {
  using Values = std::vector<int64_t>;
  EXPECT_EQ(entries(Permutation(10, 1234, 0, ShuffleDomain::sequences)),
            (Values{1, 6, 7, 5, 8, 2, 4, 0, 3, 9}));
  EXPECT_EQ(entries(Permutation(10, 1234, 0, ShuffleDomain::samples)),
            (Values{3, 9, 1, 2, 7, 5, 8, 0, 4, 6}));
  EXPECT_EQ(entries(Permutation(10, 1234, 7, ShuffleDomain::sequences)),
            (Values{1, 3, 7, 5, 8, 9, 0, 2, 6, 4}));
  EXPECT_EQ(entries(Permutation(5, (uint64_t{9} << 32) + 1, 3, ShuffleDomain::samples)),
            (Values{2, 3, 1, 4, 0}));
  const Permutation large(1'000'000'000'000, 1234, 0, ShuffleDomain::samples);
  EXPECT_EQ(large(0), 13332180995);
  EXPECT_EQ(large(1), 996481811286);
  EXPECT_EQ(large(999'999'999'999), 406660216521);
}

TEST(Permutation, DependsOnAllItsKeys) {
  const auto base = entries(Permutation(100, 1, 0, ShuffleDomain::samples));
  EXPECT_NE(base, entries(Permutation(100, 2, 0, ShuffleDomain::samples)));
  EXPECT_NE(base, entries(Permutation(100, 1 + (uint64_t{1} << 32), 0, ShuffleDomain::samples)));
  EXPECT_NE(base, entries(Permutation(100, 1, 1, ShuffleDomain::samples)));
  EXPECT_NE(base, entries(Permutation(100, 1, 0, ShuffleDomain::sequences)));
}

// Over 6,000 epochs each of the 24 orders of 4 elements is expected 250 times. Chi-squared with 23
// degrees of freedom exceeds 58 by chance with probability 1e-4, and the draw is fixed.
TEST(Permutation, SmallOrdersAreEquallyFrequent) {
  std::vector<int> counts(256);
  for (uint32_t epoch = 0; epoch < 6000; ++epoch) {
    size_t code = 0;
    for (const int64_t image : entries(Permutation(4, 5, epoch, ShuffleDomain::sequences))) {
      code = code * 4 + static_cast<size_t>(image);
    }
    ++counts[code];
  }
  EXPECT_EQ(std::count(counts.begin(), counts.end(), 0), 256 - 24);
  double chi_squared = 0;
  for (const int count : counts) {
    if (count > 0) chi_squared += (count - 250.0) * (count - 250.0) / 250.0;
  }
  EXPECT_LT(chi_squared, 58);
}

TEST(SplitSequences, Boundaries) {
  struct Case {
    const char* weights;
    int64_t sequences;
    std::array<int64_t, 3> ends;
  };
  const std::vector<Case> cases = {
      {"969,30,1", 1000, {969, 999, 1000}},
      {"969,30,1", 10, {10, 10, 10}},
      {"95,5,0", 1189, {1130, 1189, 1189}},
      {"1", 7, {7, 7, 7}},
      {"0,1", 7, {0, 7, 7}},
      {"0.5, 0.25 ,0.25", 8, {4, 6, 8}},
      {"1,1,0", 5, {2, 5, 5}},  // 2.5 is rounded to even
      {"3,1,0", 2, {2, 2, 2}},  // 1.5 is rounded to even
      {"1,1,1", 1, {0, 1, 1}},
      {"969,30,1", 0, {0, 0, 0}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.weights);
    const auto ranges = split_sequences(c.weights, c.sequences);
    int64_t begin = 0;
    for (size_t j = 0; j < 3; ++j) {
      EXPECT_EQ(ranges[j].begin, begin);
      EXPECT_EQ(ranges[j].end, c.ends[j]);
      begin = c.ends[j];
    }
  }
}

TEST(SplitSequences, MalformedStringsAreRefused) {
  for (const char* weights : {"", ",", "1,", "a", "1;2", "1,2,3,4", "-1,2", "0,0", "nan", "inf,1",
                              "1e308,1e308", "1 2", "0x10"}) {
    SCOPED_TRACE(weights);
    const std::string message =
        message_of(ExitStatus::bad_request, [&] { split_sequences(weights, 10); });
    EXPECT_TRUE(contains(message, std::string("'") + weights + "'")) << message;
  }
}

TEST_F(SamplerTest, FollowsTheDocumentedRule) {
  write(make_documents(23));
  for (const int64_t length : {1, 2, 7, 32}) {
    const SampleSource source(dataset_, options(length, 99));
    const int64_t total = dataset_->num_tokens();
    const int64_t samples = (total - 1) / length;
    ASSERT_EQ(source.tokens_per_epoch(), total);
    ASSERT_EQ(source.samples_per_epoch(), samples);
    for (uint32_t epoch = 0; epoch < 4; ++epoch) {
      const auto stream = join(entries(Permutation(23, 99, epoch, ShuffleDomain::sequences)));
      const Permutation order(samples, 99, epoch, ShuffleDomain::samples);
      for (int64_t drawn = 0; drawn < samples; ++drawn) {
        SCOPED_TRACE(testing::Message()
                     << "length " << length << " epoch " << epoch << " sample " << drawn);
        const Sample sample = sample_of(source, epoch * samples + drawn);
        const auto from = stream.begin() + order(drawn) * length;
        EXPECT_EQ(sample.tokens, std::vector<int32_t>(from, from + length));
        EXPECT_EQ(sample.labels, std::vector<int32_t>(from + 1, from + length + 1));
        EXPECT_EQ(sample.mask, std::vector<float>(static_cast<size_t>(length), 1.0F));
      }
    }
  }
}

// Independent of how the orders are drawn: within an epoch every input appears once, the samples
// chain up by their one shared token, and what is left out is a tail shorter than a sample.
TEST_F(SamplerTest, AnEpochCoversItsStreamOnce) {
  write(make_documents(40));
  constexpr int64_t kLength = 6;
  const SampleSource source(dataset_, options(kLength, 7));
  const int64_t samples = source.samples_per_epoch();
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<int> seen(static_cast<size_t>(dataset_->num_tokens()));
    std::vector<int> first(seen.size());
    int shared = 0;
    std::vector<int32_t> last_labels;
    for (int64_t i = epoch * samples; i < (epoch + 1) * samples; ++i) {
      const Sample sample = sample_of(source, i);
      for (const int32_t token : sample.tokens) ++seen[static_cast<size_t>(token)];
      first[static_cast<size_t>(sample.tokens.front())] = 1;
      last_labels.push_back(sample.labels.back());
    }
    for (const int32_t token : last_labels) shared += first[static_cast<size_t>(token)];
    EXPECT_EQ(shared, samples - 1);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), samples * kLength);
    const auto unused = std::count(seen.begin(), seen.end(), 0);
    EXPECT_EQ(unused, dataset_->num_tokens() - samples * kLength);
    EXPECT_LE(unused, kLength);
  }
}

TEST_F(SamplerTest, RandomAccessEqualsSequential) {
  write(make_documents(30));
  const SampleSource sequential(dataset_, options(5, 3));
  const int64_t count = 4 * sequential.samples_per_epoch();
  std::vector<Sample> samples;
  for (int64_t i = 0; i < count; ++i) samples.push_back(sample_of(sequential, i));

  const SampleSource random(dataset_, options(5, 3));
  const Permutation order(count, 1, 0, ShuffleDomain::samples);
  for (int64_t i = 0; i < count; ++i) {
    EXPECT_EQ(sample_of(random, order(i)), samples[static_cast<size_t>(order(i))]) << order(i);
  }
  const int64_t far = int64_t{1} << 35;
  EXPECT_EQ(sample_of(random, far), sample_of(sequential, far));
}

TEST_F(SamplerTest, ConcurrentReadersAgree) {
  write(make_documents(30));
  const SampleSource source(dataset_, options(5, 3));
  const int64_t count = 6 * source.samples_per_epoch();
  std::vector<Sample> expected;
  for (int64_t i = 0; i < count; ++i) expected.push_back(sample_of(source, i));
  const SampleSource shared(dataset_, options(5, 3));
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t drawn = (i * 7 + t * 13) % count;
        if (sample_of(shared, drawn) != expected[static_cast<size_t>(drawn)]) {
          ++wrong[static_cast<size_t>(t)];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

TEST_F(SamplerTest, SeedsAndEpochsDiffer) {
  write(make_documents(30));
  const SampleSource one(dataset_, options(5, 1));
  const SampleSource two(dataset_, options(5, 2));
  const int64_t samples = one.samples_per_epoch();
  int64_t same_seed = 0;
  int64_t same_epoch = 0;
  for (int64_t i = 0; i < samples; ++i) {
    same_seed += sample_of(one, i) == sample_of(two, i);
    same_epoch += sample_of(one, i) == sample_of(one, i + samples);
  }
  EXPECT_LT(same_seed, samples / 2);
  EXPECT_LT(same_epoch, samples / 2);
}

TEST_F(SamplerTest, ValidationIsInOrderAndInItsRange) {
  write(make_documents(20));
  SampleOptions wanted = options(4, 1);
  wanted.split = Split::validation;
  wanted.sequences = {12, 18};
  const SampleSource source(dataset_, wanted);
  const auto stream = join({12, 13, 14, 15, 16, 17});
  const int64_t samples = source.samples_per_epoch();
  ASSERT_EQ(samples, (static_cast<int64_t>(stream.size()) - 1) / 4);
  for (int64_t i = 0; i < 2 * samples; ++i) {
    const auto from = stream.begin() + i % samples * 4;
    EXPECT_EQ(sample_of(source, i).tokens, std::vector<int32_t>(from, from + 4)) << i;
    EXPECT_EQ(sample_of(source, i).labels, std::vector<int32_t>(from + 1, from + 5)) << i;
  }
}

TEST_F(SamplerTest, TrainingStaysInItsRange) {
  write(make_documents(20));
  SampleOptions wanted = options(4, 1);
  wanted.sequences = {3, 9};
  const SampleSource source(dataset_, wanted);
  const auto stream = join({3, 4, 5, 6, 7, 8});
  for (int64_t i = 0; i < 5 * source.samples_per_epoch(); ++i) {
    const Sample sample = sample_of(source, i);
    EXPECT_GE(*std::min_element(sample.tokens.begin(), sample.tokens.end()), stream.front());
    EXPECT_LE(*std::max_element(sample.labels.begin(), sample.labels.end()), stream.back());
  }
}

TEST_F(SamplerTest, EndOfDocumentMask) {
  write(make_documents(20, true));
  SampleOptions wanted = options(8, 1);
  const SampleSource plain(dataset_, wanted);
  wanted.eod_mask_loss = true;
  const SampleSource masked(dataset_, wanted);
  int zeros = 0;
  for (int64_t i = 0; i < masked.samples_per_epoch(); ++i) {
    const Sample sample = sample_of(masked, i);
    EXPECT_EQ(sample.tokens, sample_of(plain, i).tokens);
    for (size_t t = 0; t < sample.tokens.size(); ++t) {
      EXPECT_EQ(sample.mask[t], sample.tokens[t] == kEod ? 0.0F : 1.0F);
      zeros += sample.mask[t] == 0.0F;
      EXPECT_EQ(sample_of(plain, i).mask[t], 1.0F);
    }
  }
  EXPECT_GT(zeros, 0);
}

TEST_F(SamplerTest, ExactlyOneSample) {
  write({{1, 2}, {}, {3, 4, 5}});
  EXPECT_EQ(SampleSource(dataset_, options(4, 1)).samples_per_epoch(), 1);
  const std::string message = message_of(
      ExitStatus::bad_request, [&] { const SampleSource source(dataset_, options(5, 1)); });
  EXPECT_TRUE(contains(message, "has 5 tokens")) << message;
  EXPECT_TRUE(contains(message, "takes 6")) << message;
  EXPECT_TRUE(contains(message, dir_ / "set")) << message;
}

TEST_F(SamplerTest, OneDocumentHasNoValidationSplit) {
  write({{1, 2, 3, 4, 5, 6, 7, 8}});
  SampleOptions wanted = options(2, 1);
  wanted.split = Split::validation;
  wanted.sequences = split_sequences("969,30,1", dataset_->num_sequences())[1];
  const std::string message =
      message_of(ExitStatus::bad_request, [&] { const SampleSource source(dataset_, wanted); });
  EXPECT_TRUE(contains(message, "the validation split")) << message;
  EXPECT_TRUE(contains(message, "0 tokens in 0 of the data set's 1 sequences")) << message;
  EXPECT_TRUE(contains(message, "split it at blank lines")) << message;
}

TEST_F(SamplerTest, SequenceLengthMustBePositive) {
  write({{1, 2, 3}});
  for (const int64_t length : {0, -4}) {
    const std::string message = message_of(
        ExitStatus::bad_request, [&] { const SampleSource source(dataset_, options(length, 1)); });
    EXPECT_TRUE(contains(message, "sequence length of " + std::to_string(length))) << message;
  }
}

TEST_F(SamplerTest, ForeignIdsAreReportedWithTheirPlace) {
  write({{1, 2, 3}, {4, 300, 6}});
  SampleOptions wanted = options(5, 1);
  wanted.split = Split::test;
  wanted.vocab_size = 257;
  const SampleSource source(dataset_, wanted);
  const std::string message = message_of(ExitStatus::bad_request, [&] { sample_of(source, 0); });
  EXPECT_TRUE(contains(message, "token 1 of sequence 1 is 300")) << message;
  EXPECT_TRUE(contains(message, dir_ / "set.bin")) << message;
}

}  // namespace
}  // namespace troupe
